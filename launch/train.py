"""Train a policy and its draft: `python -m launch.train CONFIG [--section.field VALUE ...]`."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from launch.cli import parse_run, run_program, use_compile_cache
from launch.compile_clock import CompileClock
from launch.console import reasons
from launch.costs import COST_TABLE, CostTable, load_cells
from launch.distillation import check_distillation, distill
from launch.drafting import Switches, losing, made_with, misloaded
from launch.errors import ConfigError
from launch.evaluation import Evaluate, make_evaluate
from launch.loggers import RunLogger
from launch.pipeline import PromptPipeline, check_supervised, fixed_batches
from launch.run_directory import CHECKPOINTS, open_run
from launch.saved_draft import made_for
from launch.scoring import make_pool, make_reward
from launch.setup import Setup, set_up
from launch.speedup import check_plans, compare_plans, print_speedup
from launch.warmup import warm_up
from models.eagle3 import Eagle3Config
from specjax.checkpoint import Checkpointer
from specjax.cost import Cell, Drafting
from specjax.mesh import batch_shards
from specjax.probe import ProbeStep
from specjax.rewards import RewardFn
from specjax.train_step import init_train_state, make_train_step
from specjax.types import Params, TrainState

console = Console(highlight=False, soft_wrap=True)

Values = Mapping[str, Any]
Choice = tuple[jax.Array | None, Drafting] | None
# Number, begin, metrics and choice of a step.
Pending = tuple[int, float, dict[str, Any], Choice]


def main(argv: list[str]) -> int:
    """Run, or continue, what the command line describes."""
    use_compile_cache()
    config = parse_run(argv, "python -m launch.train", "Train a policy and its draft with GRPO.")
    setup = set_up(config)
    pool = make_pool(config.reward)
    with pool or nullcontext():
        train(
            setup,
            make_reward(pool, setup.problems.train, setup.tokenizer, setup.mesh),
            make_reward(pool, setup.problems.held_out, setup.tokenizer, setup.mesh),
        )
    return 0


def train(setup: Setup, reward_fn: RewardFn, held_out_reward: RewardFn) -> None:
    """The run: warm-up and distillation or resume, the steps, the closing comparison."""
    config, networks, mesh = setup.config, setup.networks, setup.mesh
    table = setup.train_prompts
    pipeline = PromptPipeline(table, config.data.prompts, config.seed)
    evaluate = _evaluator(setup, held_out_reward)
    parts = networks.policy, networks.drafter, reward_fn, setup.train, mesh
    step, probe = make_train_step(*parts), ProbeStep(*parts)
    if config.warmup.steps and not config.resume:
        check_supervised(setup.problems.train, setup.tokenizer, config.warmup.batch_size, _warmup_length(setup))
    if config.distill.steps and not config.resume:
        check_distillation(setup)
    check_plans(config.speedup, setup.held_out_prompts, config.draft, batch_shards(mesh))
    lengths = config.rollout.draft_lengths
    cells: list[Cell] = []
    # A resumed run keeps to the cells in its checkpoint.
    if config.cost_table is not None and not config.resume:
        cells = load_cells(Path(config.cost_table), setup.phases, lengths)
    directory = open_run(config)
    console.print(f"run directory: {directory}")
    if table.dropped:
        console.print(f"{table.dropped} prompts are empty or over {table.max_length} tokens: dropped")
    if (said := _draft_as_loaded(setup)) is not None:
        console.print(said, markup=False)
    costs = None
    if lengths:
        costs = CostTable(setup, directory / COST_TABLE, cells, replayed=config.cost_table is not None)
    with Checkpointer(directory / CHECKPOINTS, config.checkpoint.keep) as saves:
        if config.resume:
            state, first, before = _resumed(setup, saves, pipeline, costs)
        else:
            state, first = _warmed_up(setup, costs), 0
            before = evaluate(state.params) if config.eval.every else None
        restored = first if config.resume else None
        with RunLogger(directory, max(config.rollout.lengths), config.print_every, restored) as logger:
            switches, clock = Switches(setup.phases, lengths, console.print), CompileClock()
            record = StepRecord(logger, switches, _first_step(setup))
            for number in range(first + 1, config.steps + 1):
                start = time.perf_counter()
                prompts = next(pipeline)
                data_s = time.perf_counter() - start
                probing = _due(number, config.probe_every)
                if probing:
                    record.finish()
                if costs is not None and costs.due(number, probing):
                    state = replace(state, drafting=costs.refresh(state, number))
                if probing and state.drafting is not None:
                    console.print(reasons(setup.phases, lengths, state.drafting))
                if probing:
                    start = time.perf_counter()
                clock.lap()
                # A copy, still there to be told of when the state has been donated.
                by = None if state.drafting is None else jax.tree.map(jnp.copy, state.drafting)
                state, rollout, metrics = (probe if probing else step)(state, prompts)
                if (compiling := clock.lap()) and not probing:
                    console.print(f"compiled the step in {compiling:.1f} s")
                if probing:
                    measured = float(metrics["perf/speedup_vs_autoregressive"])
                    if costs is not None:
                        console.print(f"  measured over all phases: {measured:.2f} times the speed of draft length 0")
                    elif said := losing(measured, config.rollout.draft_length):
                        console.print(said)
                record.dispatched(number, start, metrics | {"time/data": data_s}, by and (rollout.k, by))
                if _due(number, config.eval.every):
                    record.wait()
                    record.finish({"eval/accuracy": evaluate(state.params)})
                if _due(number, config.checkpoint.every) or (config.checkpoint.every and number == config.steps):
                    # Logged first: a run killed behind the save resumes behind this step's line.
                    record.finish()
                    extra = {
                        "accuracy_before": before,
                        "draft_vocabulary": setup.draft_vocabulary,
                        "cost_cells": [] if costs is None else costs.cells,
                    }
                    saves.save(number, state, pipeline.get_state(), extra)
            record.finish()
    if before is not None:
        console.print(f"held-out accuracy: {before:.1%} before RL, {evaluate(state.params):.1%} after")
    if config.speedup.slots:
        rollout = setup.train.rollout
        compared = networks.policy, networks.drafter, state.params, rollout, setup.held_out_prompts, config.speedup
        print_speedup(*compare_plans(*compared, mesh), console)


class StepRecord:
    """Times each step, and logs it when the next is under way, so that fetching its metrics stalls nothing."""

    def __init__(
        self, logger: RunLogger, switches: Switches | None = None, first: Callable[[Values], None] | None = None
    ) -> None:
        """first: called with the metrics of the first step alone."""
        self._logger, self._switches, self._first = logger, switches, first
        self._pending: Pending | None = None
        self._done = 0.0

    def dispatched(self, number: int, start: float, metrics: dict[str, Any], choice: Choice = None) -> None:
        """Step `number`, begun at `start`, is on the device: the one before it can be logged.

        choice: the draft lengths of the step, [shards, phases], and what they were chosen by.
        """
        self.wait()
        previous, self._pending = self._pending, (number, start, metrics, choice)
        # Where calling a step runs it to its end, as on CPU, the next one would only count as a part of this one.
        arrays = (x for x in metrics.values() if isinstance(x, jax.Array))
        if all(x.is_ready() for x in arrays):  # pyright: ignore[reportAttributeAccessIssue]
            self.wait()
        self._log(previous)

    def wait(self) -> None:
        """Let the step last dispatched end, so that what follows is not counted as its time.

        A probe step has timed itself.
        """
        if self._pending is not None and "time/step" not in self._pending[2]:
            _, start, metrics, _ = self._pending
            jax.block_until_ready(metrics)
            now = time.perf_counter()
            # A step that was dispatched while the one before still ran begins when that one ends.
            metrics["time/step"] = now - max(start, self._done)
            self._done = now

    def finish(self, more: dict[str, float] | None = None) -> None:
        """Log the step last dispatched, with what was measured after it."""
        self.wait()
        self._log(self._pending, more)
        self._pending = None

    def _log(self, step: Pending | None, more: dict[str, float] | None = None) -> None:
        if step is None:
            return
        number, _, metrics, choice = step
        self._logger.log(number, metrics | (more or {}))
        if self._first is not None:
            self._first(metrics)
            self._first = None
        if self._switches is not None and choice is not None:
            lengths, drafting = jax.device_get(choice)
            self._switches(number, lengths[0].tolist(), drafting, metrics)


def _draft_as_loaded(setup: Setup) -> str | None:
    head, config = setup.networks.head, setup.config
    if config.draft.path is None or not isinstance(head, Eagle3Config):
        return None
    return made_with(head, setup.networks.decoder, made_for(config))


def _first_step(setup: Setup) -> Callable[[Values], None] | None:
    """What holds the first step against what the draft's checkpoint states; a resumed run has trained its draft."""
    config = setup.config
    if config.draft.path is None or config.resume:
        return None
    stated, temperature = made_for(config), config.rollout.law.temperature

    def check(metrics: Values) -> None:
        predicted = metrics.get("draft/predicted_acceptance")
        if predicted is not None and (said := misloaded(float(predicted), temperature, stated)) is not None:
            console.print(said, style="bold red", markup=False)

    return check


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _warmup_length(setup: Setup) -> int:
    return setup.config.data.max_prompt_tokens + setup.config.rollout.max_new_tokens


def _warmed_up(setup: Setup, costs: CostTable | None) -> TrainState:
    config, params = setup.config, setup.networks.params
    if config.warmup.steps:
        policy = warm_up(
            setup.networks.policy,
            params.policy,
            setup.problems.train,
            setup.tokenizer,
            _warmup_length(setup),
            config.warmup,
            config.seed,
            setup.mesh,
            report=lambda step, loss: console.print(f"warm-up step {step}: loss {loss:.3f}"),
        )
        params = replace(params, policy=policy)
    if config.distill.steps:
        params = replace(params, draft=distill(setup, params, console.print).draft)
    return _fresh(setup, params, None if costs is None else costs.update(params, 0))


def _fresh(setup: Setup, params: Params, seconds: np.ndarray | None) -> TrainState:
    config = setup.config
    prompts = config.data.prompts, config.data.max_prompt_tokens
    return init_train_state(params, setup.train, setup.mesh, config.loss.kl_coefficient > 0, seconds, prompts)


def _resumed(
    setup: Setup, saves: Checkpointer, pipeline: PromptPipeline, costs: CostTable | None
) -> tuple[TrainState, int, float | None]:
    config = setup.config
    lengths = config.rollout.draft_lengths
    seconds = np.ones((len(setup.phases), len(lengths)), np.float32) if lengths else None
    fresh = _fresh(setup, setup.networks.params, seconds)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
    try:
        checkpoint = saves.restore(abstract)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    if checkpoint.extra["draft_vocabulary"] != setup.draft_vocabulary:
        raise ConfigError("resume: the problems have changed, and with them the draft's vocabulary")
    pipeline.set_state(checkpoint.data)
    console.print(f"resumed after step {checkpoint.step}")
    if costs is not None:
        costs.resume([Cell(*cell) for cell in checkpoint.extra["cost_cells"]], checkpoint.step)
    return checkpoint.state, checkpoint.step, checkpoint.extra["accuracy_before"]


def _evaluator(setup: Setup, reward_fn: RewardFn) -> Evaluate:
    config, networks = setup.config, setup.networks
    shards = batch_shards(setup.mesh)
    table = setup.held_out_prompts
    size = min(config.eval.prompts, len(table.rows))
    return make_evaluate(
        networks.policy,
        networks.drafter,
        reward_fn,
        setup.train.rollout,
        config.eval.samples,
        fixed_batches(table.first(size), -(-size // shards) * shards),
        config.seed,
        setup.mesh,
    )


if __name__ == "__main__":
    raise SystemExit(run_program(main))
