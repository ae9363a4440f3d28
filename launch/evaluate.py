"""Accuracy, pass@k and majority@k: `python -m launch.evaluate CONFIG [--checkpoint DIR] [--section.field VALUE ...]`.

Completions come about as in training: the same speculative rollout, the same reward. What they are drawn from is
`--rollout.law`; no draft changes it.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from configs.schema import RunConfig
from launch.build.experiment import Experiment, build_experiment
from launch.build.networks import build_problems, load_problems
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, check_writable
from launch.data.batches import PromptTable, fixed_batches
from launch.data.problems import Problem
from launch.evaluation.report import print_report, report
from launch.evaluation.sampler import Sampled, Sampler, prompts_a_batch
from launch.evaluation.statistics import INTERVAL
from launch.rewards.final_answers import final_answer_of
from launch.rewards.reward_fn import make_pool, make_reward
from launch.run.directory import params_of
from launch.timing import origin
from models.files import write_atomically
from specjax.checkpoint import Which
from specjax.drafters import NoDrafter
from specjax.rewards import RewardFn
from specjax.types import Prompts

console = Console(highlight=False, soft_wrap=True, markup=False)

HELD_OUT = "held-out"


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs:
    """Options of launch.evaluate alone.

    Attributes:
        checkpoint:      the directory of a run; None takes the networks as the recipe starts them.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        files:           JSONL files of problems, with the fields that the data section names; empty takes the recipe's
                         held-out problems.
        prompts:         of each set, the first so many; None takes all.
        samples:         completions of each prompt.
        k:               of pass@k and majority@k, each within 1 .. samples; empty takes the powers of two.
        json:            a file for the numbers.
        save:            a JSONL file for the completions: set, id of the prompt (its place in the set), completion,
                         reward.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    files: tuple[str, ...] = ()
    prompts: int | None = None
    samples: int = 1
    k: tuple[int, ...] = ()
    json: str | None = None
    save: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not all(1 <= k <= self.samples for k in self.k):
            raise ValueError(f"k = {self.k}: each must be within 1 .. samples = {self.samples}")
        for name in ("json", "save"):
            check_writable(name, getattr(self, name))

    @property
    def counts(self) -> tuple[int, ...]:
        """The k's, ascending; 1 is the accuracy and left to it."""
        powers = (2**i for i in range(1, self.samples.bit_length()))
        return tuple(k for k in sorted(set(self.k or powers)) if k > 1)


def main(argv: list[str]) -> int:
    """Sample, score, and print what that comes to, set by set."""
    use_compile_cache()
    config, own = parse_run_and(
        EvaluateArgs, argv, "python -m launch.evaluate", "Accuracy, pass@k and majority@k.", trains=False
    )
    check_policy_source(config, own.checkpoint)
    sets = {path: load_problems(path, config.data) for path in own.files} or {HELD_OUT: _held_out(config)}
    experiment = build_experiment(config, training=False)
    tables = {name: _table(experiment, name, problems, own.prompts) for name, problems in sets.items()}
    draft_length, sample = _sampler(experiment, own)
    save = None if own.save is None else _completions_file(Path(own.save), experiment)
    largest = max(len(table.rows) for table in tables.values())
    batch_size = prompts_a_batch(experiment.sequences, own.samples, largest, experiment.mesh)
    reports = []
    pool = make_pool(config.reward)
    with pool or nullcontext():
        # Nothing but a majority needs it.
        final_answer = final_answer_of(config.reward) if own.counts else None
        if final_answer is None and own.counts:
            console.print(f"no majority@k: no function final_answer beside reward.scorer = {config.reward.scorer}")
        for name, table in tables.items():
            score, parts = jax.jit(make_reward(pool, sets[name], experiment.tokenizer, experiment.mesh)), []
            for prompts in fixed_batches(table, batch_size):
                parts.append(sample(score, prompts))
                if save is not None:
                    save(name, parts[-1])
            reports.append(report(name, parts, own.samples, own.counts, experiment.tokenizer, final_answer))
            print_report(reports[-1], draft_length, console)
    if own.json is not None:
        said = origin("launch.evaluate") | {
            "recipe": config.name,
            "checkpoint": own.checkpoint,
            "checkpoint_step": own.checkpoint_step,
        }
        said |= {"draft_length": draft_length, "law": asdict(config.rollout.law), "scorer": config.reward.scorer}
        said |= {"intervals": INTERVAL, "sets": [each.as_json() for each in reports]}
        write_atomically(Path(own.json), json.dumps(said, indent=2) + "\n")
    return 0


def _held_out(config: RunConfig) -> list[Problem]:
    held_out = config.data.held_out
    return build_problems(config).held_out if held_out is None else load_problems(held_out, config.data)


def _table(experiment: Experiment, name: str, problems: list[Problem], count: int | None) -> PromptTable:
    table = PromptTable.build(problems, experiment.tokenizer, experiment.config.data.max_prompt_tokens)
    if not table.rows:
        raise ConfigError(f"{name}: has no prompt of 1 .. {table.max_length} tokens (data.max_prompt_tokens)")
    if table.dropped:
        console.print(f"{name}: {table.dropped} prompts are empty or over {table.max_length} tokens: dropped")
    return table if count is None else table.first(count)


def _sampler(experiment: Experiment, own: EvaluateArgs) -> tuple[int, Callable[[RewardFn, Prompts], Sampled]]:
    """The draft length, and what samples at it."""
    networks = experiment.networks
    params = params_of(own.checkpoint, experiment, own.checkpoint_step)
    drafter = networks.drafter
    if own.checkpoint is None and networks.draft_from is None and jax.tree.leaves(params.draft):
        console.print("the draft has random weights: decoding without it")
        params, drafter = replace(params, draft={}), NoDrafter()
    sampler = Sampler(
        networks.policy, drafter, experiment.train.rollout, own.samples, experiment.config.seed, experiment.mesh
    )
    return sampler.draft_length, partial(sampler, params)


def _completions_file(path: Path, experiment: Experiment) -> Callable[[str, Sampled], None]:
    """What writes completions behind those before, a line each; the file is empty to begin with."""

    def write(text: str, mode: Literal["w", "a"]) -> None:
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"save = {path}: cannot write it: {error.strerror}") from None

    def append(name: str, sampled: Sampled) -> None:
        lines = []
        for row, value in enumerate(sampled.value.tolist()):
            text = experiment.tokenizer.decode(sampled.tokens[row, : sampled.lengths[row]].tolist())
            prompt, reward = int(sampled.ids[row]), value if math.isfinite(value) else None
            lines.append(json.dumps({"set": name, "id": prompt, "completion": text, "reward": reward}) + "\n")
        write("".join(lines), "a")

    write("", "w")
    return append


if __name__ == "__main__":
    raise SystemExit(run_program(main))
