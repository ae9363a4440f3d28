"""Distillation by itself: train the draft, save it, measure it on held-out prompts, report."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.cli.paths import write_results
from launch.data.json_lines import JsonLinesWriter
from launch.data.responses import Answers, answer_records, load_answers
from launch.distillation.acceptance import check_counts, measure_acceptance
from launch.distillation.break_even import measure_break_even
from launch.distillation.export import check_trained, made_for_distillation, write_trained
from launch.distillation.options import DistillArgs
from launch.distillation.report import distillation_json, print_distillation
from launch.distillation.trainer import check_distillation, distill
from models.checkpoints.made_for import state_made_for
from specjax.types import Params

REPORT = "distill.json"


def distill_offline(experiment: Experiment, params: Params, own: DistillArgs, out: Path, console: Console) -> None:
    """Distil the draft of `params`, write it and what is known of it to `out`, and print that.

    Raises ConfigError, before anything is made, if that is impossible.
    """
    config, networks = experiment.config, experiment.networks
    given = None if own.responses is None else _given(Path(own.responses), experiment, console)
    check_distillation(experiment, given)
    check_trained(networks, own.public_dialect)
    if max(config.rollout.lengths) == 0:
        raise ConfigError("rollout.draft_length = 0: must be at least 1, to measure the draft by")
    if not experiment.held_out_prompts.rows:
        raise ConfigError(f"data.held_out = {config.data.held_out}: has no usable prompt to measure the draft on")
    check_counts(experiment)
    kept = None if own.save_responses is None else JsonLinesWriter("save_responses", own.save_responses)

    def keep(answers: Answers) -> None:
        if kept is not None:
            kept.append(answer_records(answers, experiment.problems.train, experiment.tokenizer))

    out.mkdir(parents=True, exist_ok=True)

    # A draft that has been trained has its vocabulary.
    trained = own.start == "checkpoint"
    own_vocabulary = config.draft.vocab_size is not None and not trained
    result = distill(
        experiment, params, console.print, given=given, own_vocabulary=own_vocabulary, trained=trained, keep=keep
    )
    distilled = replace(params, draft=result.draft)
    policy = own.checkpoint or config.model.path
    draft = replace(networks.draft, drafter=result.drafter)
    written = write_trained(out, experiment, draft, distilled, own.public_dialect, own.verifier or policy)
    console.print(f"draft saved: {' and '.join(map(str, written))}")

    temperature = config.rollout.law.temperature
    acceptance = [measure_acceptance(experiment, result.drafter, distilled, temperature, untrained=params)]
    for other in sorted(set(own.temperatures) - {temperature}):
        acceptance.append(measure_acceptance(experiment, result.drafter, distilled, other))
    for directory in written:
        state_made_for(directory, made_for_distillation(policy, networks.decoder, acceptance[0]))
    break_even = measure_break_even(experiment, result.drafter, distilled, result.cost, own.repeats)
    origin = {"recipe": config.name, "policy": policy, "responses": own.responses}
    write_results(out / REPORT, origin | distillation_json(result, acceptance, break_even))
    print_distillation(result, acceptance, break_even, console)


def _given(path: Path, experiment: Experiment, console: Console) -> Answers:
    config, vocab_size = experiment.config, experiment.networks.policy.vocab_size
    limits = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    answers, dropped = load_answers(path, experiment.tokenizer, *limits, vocab_size)
    if dropped:
        console.print(f"{dropped} responses belong to prompts that are empty or over {limits[0]} tokens: dropped")
    return answers
