"""Initialise a draft in-domain, offline: `python -m launch.distill CONFIG --out DIR [--section.field VALUE ...]`.

The policy answers the training prompts, a draft learns from that, is measured on the held-out prompts, and is saved:

    DIR/draft/        the draft, which --draft.path of the other programs reads
    DIR/distill.json  what it cost, what of it is accepted, and after how many steps it has paid for itself
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from configs.schema import RunConfig
from configs.schema.networks import LookupConfig
from launch.acceptance import measure_acceptance
from launch.answers import Answers, load_answers, save_answers
from launch.cli import parse_run_and, run_program, use_compile_cache
from launch.distill_report import as_json, print_report
from launch.distillation import Distillation, check_distillation, distill
from launch.errors import ConfigError
from launch.payback import measure_payback
from launch.run_directory import restore_policy, write_atomically
from launch.setup import Setup, set_up
from models.config import DecoderConfig
from models.draft_checkpoint import save_draft_checkpoint
from models.policy_checkpoint import save_policy_checkpoint

console = Console(highlight=False, soft_wrap=True, markup=False)

DRAFT, REPORT = "draft", "distill.json"


@dataclass(frozen=True, kw_only=True)
class DistillArgs:
    """Options of launch.distill alone; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:     the directory of a run, whose newest save has the policy; None takes that of model.path.
        responses:      a JSONL file of answers to learn from, with the fields `prompt` and `response`; None generates.
        save_responses: a file to write the generated answers to, which --responses reads.
        temperatures:   to measure acceptance at, beside the run's own.
        repeats:        timings of a step's rollout with the draft and without.
    """

    checkpoint: str | None = None
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


def main(argv: list[str]) -> int:
    """Distil, save, measure, and say how it went."""
    use_compile_cache()
    config, own = parse_run_and(
        DistillArgs, argv, "python -m launch.distill", "Initialise a draft from the policy's own answers, offline."
    )
    out = _checked_out(config)
    _check(config, own)
    # What a lookup beside the draft finds is no merit of the draft.
    config = replace(config, draft=replace(config.draft, lookup=LookupConfig()))
    setup = set_up(config)
    if setup.networks.head is None:
        raise ConfigError(f"draft.kind = {config.draft.kind}: has no format to be saved in by itself")
    given = None if own.responses is None else _given(Path(own.responses), setup)
    check_distillation(setup, given)
    if not setup.held_out_prompts.rows:
        raise ConfigError(f"data.held_out = {config.data.held_out}: has no usable prompt to measure the draft on")
    params = setup.networks.params
    if own.checkpoint is not None:
        params = replace(params, policy=restore_policy(Path(own.checkpoint), setup))
    out.mkdir(parents=True, exist_ok=True)

    own_vocabulary = config.draft.vocab_size is not None
    result = distill(setup, params, console.print, given=given, own_vocabulary=own_vocabulary)
    if own.save_responses is not None:
        save_answers(Path(own.save_responses), result.answers, setup.problems.train, setup.tokenizer)
    distilled = replace(params, draft=result.draft)
    _save(out / DRAFT, setup, result)
    console.print(f"draft saved: {out / DRAFT}")

    temperature = config.rollout.law.temperature
    acceptance = [measure_acceptance(setup, result.drafter, distilled, temperature, untrained=params)]
    for other in sorted(set(own.temperatures) - {temperature}):
        acceptance.append(measure_acceptance(setup, result.drafter, distilled, other))
    payback = measure_payback(setup, result.drafter, distilled, result.cost, own.repeats)
    said = {"recipe": config.name, "policy": own.checkpoint or config.model.path, "responses": own.responses}
    report = said | as_json(result, acceptance, payback)
    write_atomically(out / REPORT, json.dumps(report, indent=2) + "\n")
    print_report(result, acceptance, payback, console)
    return 0


def _check(config: RunConfig, own: DistillArgs) -> None:
    """Raise ConfigError for what can be refused before anything is built."""
    if config.draft.kind == "none":
        raise ConfigError("draft.kind = none: there is no draft to distil")
    if max(config.rollout.lengths) == 0:
        raise ConfigError("rollout.draft_length = 0: must be at least 1, to measure the draft by")
    if own.checkpoint is None and config.model.path is None:
        raise ConfigError("checkpoint = None: must be a run's directory, or model.path that of a policy")
    if own.save_responses is not None and not Path(own.save_responses).absolute().parent.is_dir():
        raise ConfigError(f"save_responses = {own.save_responses}: its directory does not exist")


def _checked_out(config: RunConfig) -> Path:
    if config.out is None:
        raise ConfigError("out = None: must be the directory to write")
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out = {out}: exists and is not an empty directory")
    return out


def _given(path: Path, setup: Setup) -> Answers:
    config, vocab_size = setup.config, setup.networks.decoder.vocab_size
    limits = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    answers, dropped = load_answers(path, setup.tokenizer, *limits, vocab_size)
    if dropped:
        console.print(f"{dropped} responses belong to prompts that are empty or over {limits[0]} tokens: dropped")
    return answers


def _save(directory: Path, setup: Setup, result: Distillation) -> None:
    networks, ids = setup.networks, getattr(result.drafter, "target_ids", None)
    if isinstance(networks.head, DecoderConfig):
        save_policy_checkpoint(directory, result.draft, networks.head)
    elif networks.head is not None:
        save_draft_checkpoint(directory, result.draft, networks.head, ids, networks.decoder.feature_layers)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
