"""Offline distillation: train a draft, save it, measure its acceptance on held-out prompts, report."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.cli.errors import ConfigError
from launch.cli.paths import write_results
from launch.cli.unfinished import Unfinished
from launch.data.hub import hub_name
from launch.data.json_lines import JsonLinesWriter
from launch.data.responses import Answers, answer_records, load_answers
from launch.distillation.acceptance import check_counts, measure_acceptance
from launch.distillation.export import check_trained, made_for_distillation, remove_written, write_trained
from launch.distillation.options import DistillArgs
from launch.distillation.report import distillation_json, print_distillation
from launch.distillation.trainer import check_distillation, distill
from launch.setup.experiment import Experiment
from models.checkpoints.made_for import state_made_for
from specjax.types import Params

REPORT = "distill.json"


def distill_offline(
    experiment: Experiment, params: Params, args: DistillArgs, out: Path, console: Console, unfinished: Unfinished
) -> None:
    """Distil the draft of `params`, measure it, write it and distill.json to `out`, and print the results.

    Raises ConfigError before it writes anything if this run cannot distil or measure a draft. Raises Stopped at a
    signal.
    """
    config, networks = experiment.config, experiment.networks
    responses = None
    if args.responses is not None:
        with unfinished.phase("loading of answers", 1, "files", kept=False, quiet=True) as phase:
            responses = _load_responses(Path(args.responses), experiment, console)
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
        experiment, params, unfinished, given=responses, choose_vocabulary=choose_vocabulary, trained=trained, keep=keep
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
    measured = experiment, result.drafter, distilled
    acceptance = [measure_acceptance(*measured, temperature, untrained=params, unfinished=unfinished)]
    for other in sorted(set(args.temperatures) - {temperature}):
        acceptance.append(measure_acceptance(*measured, other, unfinished=unfinished))
    for directory in written:
        state_made_for(directory, made_for_distillation(policy, networks.decoder, acceptance[0]))
    origin = {"recipe": config.name, "policy": policy, "responses": args.responses}
    write_results(out / REPORT, origin | distillation_json(result, acceptance))
    print_distillation(result, acceptance, console)


def _load_responses(path: Path, experiment: Experiment, console: Console) -> Answers:
    """Return the answers in a JSONL file, and print how many were dropped."""
    config, vocab_size = experiment.config, experiment.networks.policy.vocab_size
    limits = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    answers, dropped = load_answers(path, experiment.tokenizer, *limits, vocab_size)
    if dropped:
        console.print(f"{dropped} responses dropped: prompt empty or over {limits[0]} tokens")
    return answers
