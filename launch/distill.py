"""Initialise a draft in-domain, offline: `python -m launch.distill CONFIG --out DIR [--section.field VALUE ...]`.

The policy answers the training prompts, a draft learns from that, is measured on the held-out prompts, and is saved:

    DIR/draft/        the draft, which --draft.path of the other programs reads
    DIR/policy/       instead of that the policy with an MTP head stitched in, which --model.path reads
    DIR/DIALECT/      with --dialect, an EAGLE-3 head once more as SpecForge or speculators lay it out
    DIR/distill.json  what it cost, what of it is accepted, and after how many steps it has paid for itself
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from configs.schema import RunConfig
from configs.schema.networks import LookupConfig
from launch.build.experiment import Experiment, build_experiment
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, check_writable, new_output_directory
from launch.data.responses import Answers, answers_file, load_answers
from launch.distillation.acceptance import measure_acceptance
from launch.distillation.break_even import measure_payback
from launch.distillation.export import check_trained, check_verifier, write_draft, write_policy
from launch.distillation.made_for import of_distillation
from launch.distillation.report import as_json, print_report
from launch.distillation.trainer import check_distillation, distill
from launch.run.directory import restore_params, restore_policy
from models.checkpoints.made_for import state_made_for
from models.drafts.mtp import MTPConfig
from models.files import write_atomically
from models.hf.eagle3_dialects import Dialect
from specjax.checkpoint import Which
from specjax.types import Params

console = Console(highlight=False, soft_wrap=True, markup=False)

DRAFT, POLICY, REPORT = "draft", "policy", "distill.json"


@dataclass(frozen=True, kw_only=True)
class DistillArgs:
    """Options of launch.distill alone; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:      the directory of a run, which has the policy; None takes that of model.path.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        start:           the draft to begin with: as the recipe starts it, or that of `checkpoint`.
        dialect:         whose layout to write an EAGLE-3 head in as well; ours writes DIR/draft alone.
        verifier:        the policy's name, as the serving engine knows it, for speculators' file to state; None states
                         the directory that the policy was read from.
        responses:       a JSONL file of answers to learn from, with the fields `prompt` and `response`; None generates.
        save_responses:  a file to write the generated answers to, which --responses reads.
        temperatures:    to measure acceptance at, beside the run's own.
        repeats:         timings of a step's rollout with the draft and without.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    start: Literal["recipe", "checkpoint"] = "recipe"
    dialect: Literal["ours", "specforge", "speculators"] = "ours"
    verifier: str | None = None
    responses: str | None = None
    save_responses: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    repeats: int = 10

    def __post_init__(self) -> None:
        if not all(0 <= temperature < float("inf") for temperature in self.temperatures):
            raise ValueError(f"temperatures = {self.temperatures}: each must be at least 0 and finite")
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: must be at least 1")
        if self.responses is not None and self.save_responses is not None:
            raise ValueError(f"save_responses = {self.save_responses}: must be none with responses, for none are made")
        if self.start == "checkpoint" and self.checkpoint is None:
            raise ValueError("start = checkpoint: must be recipe without checkpoint")


def main(argv: list[str]) -> int:
    """Distil, save, measure, and say how it went."""
    use_compile_cache()
    config, own = parse_run_and(
        DistillArgs, argv, "python -m launch.distill", "Initialise a draft from the policy's own answers, offline."
    )
    out = new_output_directory(config)
    _check(config, own)
    # What a lookup beside the draft finds is no merit of the draft.
    config = replace(config, draft=replace(config.draft, lookup=LookupConfig()))
    experiment = build_experiment(config)
    dialect = None if own.dialect == "ours" else own.dialect
    check_trained(experiment.networks, config.draft.kind, dialect)
    given = None if own.responses is None else _given(Path(own.responses), experiment)
    check_distillation(experiment, given)
    if not experiment.held_out_prompts.rows:
        raise ConfigError(f"data.held_out = {config.data.held_out}: has no usable prompt to measure the draft on")
    params = _start(experiment, own)
    keep = None
    if own.save_responses is not None:
        keep = answers_file(Path(own.save_responses), experiment.problems.train, experiment.tokenizer)
    out.mkdir(parents=True, exist_ok=True)

    # A draft that has been trained has its vocabulary.
    trained = own.start == "checkpoint"
    own_vocabulary = config.draft.vocab_size is not None and not trained
    result = distill(
        experiment, params, console.print, given=given, own_vocabulary=own_vocabulary, trained=trained, keep=keep
    )
    distilled = replace(params, draft=result.draft)
    policy = own.checkpoint or config.model.path
    ids = getattr(result.drafter, "target_ids", None)
    written = _write(out, experiment, distilled, ids, dialect, own.verifier or policy)
    console.print(f"draft saved: {' and '.join(map(str, written))}")

    temperature = config.rollout.law.temperature
    acceptance = [measure_acceptance(experiment, result.drafter, distilled, temperature, untrained=params)]
    for other in sorted(set(own.temperatures) - {temperature}):
        acceptance.append(measure_acceptance(experiment, result.drafter, distilled, other))
    for directory in written:
        state_made_for(directory, of_distillation(policy, experiment.networks.decoder, acceptance[0]))
    paybacks = measure_payback(experiment, result.drafter, distilled, result.cost, own.repeats)
    said = {"recipe": config.name, "policy": policy, "responses": own.responses}
    report = said | as_json(result, acceptance, paybacks)
    write_atomically(out / REPORT, json.dumps(report, indent=2) + "\n")
    print_report(result, acceptance, paybacks, console)
    return 0


def _start(experiment: Experiment, own: DistillArgs) -> Params:
    """The networks to begin with."""
    params = experiment.networks.params
    if own.checkpoint is None:
        return params
    if own.start == "checkpoint":
        return restore_params(Path(own.checkpoint), experiment, own.checkpoint_step)
    return replace(params, policy=restore_policy(Path(own.checkpoint), experiment, own.checkpoint_step))


def _write(
    out: Path,
    experiment: Experiment,
    params: Params,
    target_ids: np.ndarray | None,
    dialect: Dialect | None,
    verifier: str | None,
) -> list[Path]:
    """The draft by itself, or the policy with the head that is a part of it; returns the directories."""
    networks = experiment.networks
    if isinstance(networks.head, MTPConfig):
        source, head = experiment.config.model.path, (networks.head, params.draft)
        write_policy(out / POLICY, networks.decoder, params.policy, source, head)
        return [out / POLICY]
    write_draft(out / DRAFT, networks, params.draft, target_ids)
    if dialect is None:
        return [out / DRAFT]
    write_draft(out / dialect, networks, params.draft, target_ids, dialect, verifier)
    return [out / DRAFT, out / dialect]


def _check(config: RunConfig, own: DistillArgs) -> None:
    """Raise ConfigError for what can be refused before anything is built."""
    if config.draft.kind == "none":
        raise ConfigError("draft.kind = none: there is no draft to distil")
    if max(config.rollout.lengths) == 0:
        raise ConfigError("rollout.draft_length = 0: must be at least 1, to measure the draft by")
    check_policy_source(config, own.checkpoint)
    check_verifier(own.verifier, own.dialect)
    check_writable("save_responses", own.save_responses)


def _given(path: Path, experiment: Experiment) -> Answers:
    config, vocab_size = experiment.config, experiment.networks.decoder.vocab_size
    limits = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    answers, dropped = load_answers(path, experiment.tokenizer, *limits, vocab_size)
    if dropped:
        console.print(f"{dropped} responses belong to prompts that are empty or over {limits[0]} tokens: dropped")
    return answers


if __name__ == "__main__":
    raise SystemExit(run_program(main))
