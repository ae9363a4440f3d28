"""Offline distillation: train a draft, save it, measure its acceptance on held-out prompts, report."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from launch.acceptance.held_out import AcceptanceMeter, check_counts
from launch.cli.paths import check_checkpoint, check_writable, write_results
from launch.data.answer_files import answer_records, load_answers
from launch.data.hub import hub_name
from launch.data.json_lines import JsonLinesWriter
from launch.data.responses import Answers
from launch.distillation.report import distillation_json, print_distillation
from launch.distillation.trainer import check_distillation, distill
from launch.errors import ConfigError
from launch.exports.draft import check_trained, check_verifier, remove_written, write_trained
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from models.checkpoints.made_for import state_made_for
from models.hf.drafts.dialects import Dialect
from specjax.checkpoint import Which
from specjax.options import Options
from specjax.sampling import Temperature
from specjax.types import Params

REPORT = "distill.json"


@dataclass(frozen=True, kw_only=True)
class DistillArgs(Options):
    """Options that only launch.distill has. Its --out is a new or empty directory to write into.

    Attributes:
        checkpoint:      Run directory whose policy generates the answers. None: the policy of model.path.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        start:           Draft to start from: the recipe's, or the one in `checkpoint`.
        dialect:         Also write the draft in this layout; ours: only DIR/draft.
        verifier:        Policy name to write in a speculators config. None: the policy's directory.
        responses:       File of answers (prompt and response, messages or conversations), a folder of files or a name
                         on the hub. None: generate them.
        save_responses:  File for the generated answers.
        temperatures:    Further temperatures at which acceptance is measured.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    start: Literal["recipe", "checkpoint"] = "recipe"
    dialect: Literal["ours", "specforge", "speculators", "zlab", "deepspec"] = "ours"
    verifier: str | None = None
    responses: str | None = None
    save_responses: str | None = None
    temperatures: tuple[Temperature, ...] = (0.0, 0.6, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.responses is not None and self.save_responses is not None:
            raise ValueError(f"save_responses = {self.save_responses}: must not be set together with responses")
        if self.start == "checkpoint" and self.checkpoint is None:
            raise ValueError("start = checkpoint: needs checkpoint; must be recipe otherwise")
        check_verifier(self.verifier, self.dialect)
        check_writable("save_responses", self.save_responses)
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    @property
    def public_dialect(self) -> Dialect | None:
        """Return the additional layout to write; None: only ours."""
        return None if self.dialect == "ours" else self.dialect


def distill_offline(experiment: Experiment, params: Params, args: DistillArgs, out: Path, console: Console) -> None:
    """Distil the draft of `params`, measure it, write it and distill.json to `out`, and print the results.

    Raises ConfigError before it writes anything if this run cannot distil or measure a draft. Raises Stopped at a
    signal.
    """
    config, networks = experiment.config, experiment.networks
    responses = None
    if args.responses is not None:
        with long_phase("loading of answers", 1, "files", kept=False, quiet=True) as phase:
            responses = _load_responses(args.responses, experiment, console)
            phase.finish()
    check_distillation(experiment, responses)
    check_trained(networks, args.public_dialect)
    if max(config.rollout.lengths) == 0:
        raise ConfigError("rollout.draft_length = 0: must be at least 1, to measure the draft's acceptance")
    if not experiment.held_out_prompts.rows:
        raise ConfigError(
            f"data.held_out = {config.data.held_out}: must hold a usable prompt, to measure the draft's acceptance"
        )
    check_counts(experiment)
    writer = None if args.save_responses is None else JsonLinesWriter("save_responses", args.save_responses)

    def keep(answers: Answers) -> None:
        if writer is not None:
            writer.append(answer_records(answers, experiment.problems.train, experiment.tokenizer))

    # A trained draft keeps its reduced vocabulary, because its weights depend on it.
    trained = args.start == "checkpoint"
    choose_vocabulary = config.draft.vocab_size is not None and not trained
    result = distill(
        experiment,
        params,
        given=responses,
        choose_vocabulary=choose_vocabulary,
        trained=trained,
        keep=keep,
    )
    distilled = replace(params, draft=result.draft)
    policy = args.checkpoint or config.model.path
    name = None if policy is None else hub_name(policy, "model")
    # Serving engines do not take a revision.
    verifier = args.verifier or (policy if name is None else name.repo)
    draft = replace(networks.draft, drafter=result.drafter)
    remove_written(out, args.public_dialect)
    written = write_trained(out, experiment, draft, distilled, args.public_dialect, verifier)
    console.print(f"draft saved: {' and '.join(map(str, written))}")

    temperature = config.rollout.law.temperature
    others = sorted(set(args.temperatures) - {temperature})
    own, *further = [AcceptanceMeter(experiment, result.drafter, distilled, each) for each in (temperature, *others)]
    acceptance = [own.measure(params), *(meter.measure() for meter in further)]
    for directory in written:
        state_made_for(directory, acceptance[0].made_for(policy, networks.decoder))
    origin = {"recipe": config.name, "policy": policy, "responses": args.responses}
    write_results(out / REPORT, origin | distillation_json(result, acceptance))
    print_distillation(result, acceptance, console)


def _load_responses(path: str, experiment: Experiment, console: Console) -> Answers:
    """Return the answers in a file, and print how many were left out or cut."""
    config, vocab_size = experiment.config, experiment.networks.policy.vocab_size
    limits = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    answers, notes = load_answers(path, experiment.tokenizer, *limits, vocab_size)
    for note in notes:
        console.print(note)
    return answers
