"""Training steps run stage by stage and timed, with the same functions, tokens and gradients as the fused program."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.adapters import joined
from specjax.parallel.mesh import BATCH_AXES, shapes_on
from specjax.program import Program, finish_compiling
from specjax.rewards import HostReward
from specjax.rollout.generate import Choice, abstract_prompts, copy_on, make_prepare, place
from specjax.train.batch import ScoredSequences, TrainBatch
from specjax.train.metrics import Metrics
from specjax.train.selection import withhold_rewards
from specjax.train.stages import LogProbs, Stages
from specjax.train.train_step import StepResult, start_compiling_turns
from specjax.types import Params, Prompts, PyTree, Reward, Rollout, TrainState

Seconds = dict[str, float]


class Clock:
    """Times each run of a program to its end, and leaves out its compilation."""

    def __init__(self) -> None:
        self._last = 0.0

    def start(self) -> None:
        """Start the clock: the seconds of the next call count from now."""
        self._last = time.perf_counter()

    def __call__(self, program: Program, *args: PyTree, pure: bool = False) -> tuple[Any, float]:
        """Return the result of `program(*args)`, and the seconds since the previous call ended, so that they add up.

        They exclude compilation, on the program's first call. With `pure` they exclude the first run too, which is
        slower than later ones: allowed if nothing is donated and the host is not called.
        """
        if not program.compiled:
            # If it was started before for the same arguments, jax has it.
            program.start_compiling(*args)
            program.wait(*args)
            if pure:
                jax.block_until_ready(program(*args))
            self.start()
        return self.on_host(program, *args)

    def on_host(self, run: Callable, *args: PyTree) -> tuple[Any, float]:
        """Return the result of `run(*args)`, and the seconds since the previous call ended, without compiling it."""
        result = jax.block_until_ready(run(*args))
        seconds = time.perf_counter() - self._last
        self._last += seconds
        return result, seconds


class StagedStep:
    """Step that is called like the fused one and returns (its result, the seconds of each stage in order).

    `prepare` gathers and casts the parameters. `generation` is the rollout alone. `reward` scores the completions and
    selects those to train on. `logprob` runs the forwards of policies that are not trained. `train` computes
    advantages, forward, backward and updates. Compilation and the first runs of `prepare` and `generation` are
    excluded; the first run of another program, which is slower than later ones, is included. The state is donated, all
    but the frozen base of adapters.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages, self._timed = stages, Clock()
        self._programs: dict[str, Program] = {}
        self._prepare: Callable[[Params], Params] | None = None
        self._host_turns = stages.host_turns

    def __call__(self, state: TrainState, prompts: Prompts, chosen: Choice = None) -> tuple[StepResult, Seconds]:
        """Take a step stage by stage. chosen: index of each phase's draft length; None: `Stages.choose` picks it."""
        if not self._programs:
            self.start_compiling(state, prompts)
        if not self._programs["train"].compiled:
            finish_compiling()
        stages, programs, seconds = self.stages, self._programs, dict[str, float]()
        if chosen is None:
            chosen = stages.choose(state)
        jax.block_until_ready((state, chosen))
        self._timed.start()
        prompts = place(prompts, stages.mesh)
        params, seconds["prepare"] = self.prepare(state)
        if self._host_turns is not None:
            args = params, prompts, stages.seed_step(state.step), chosen
            rollout, seconds["generation"] = self._timed.on_host(self._host_turns.generate, *args)
        else:
            rollout, seconds["generation"] = self._timed(
                programs["generate"], params, prompts, state.step, chosen, state.carried, pure=True
            )
        # Free the gathered copy, as the fused program has done by now: meshes are chosen for its memory.
        del params
        if isinstance(stages.reward_fn, HostReward):
            scores, scoring_s = self._timed.on_host(stages.reward, rollout, prompts)
        else:
            scores, scoring_s = self._timed(programs["reward"], rollout, prompts)
        (scores, sequences, metrics), selecting_s = self._timed(programs["select"], rollout, prompts, scores)
        seconds["reward"] = scoring_s + selecting_s
        log_probs, seconds["logprob"] = self._timed(programs["logprob"], state, sequences)
        kept = frozen(state)
        train = with_frozen(state), kept, sequences, log_probs, prompts, rollout
        (state, batch, losses), seconds["train"] = self._timed(programs["train"], *train)
        scored = replace(rollout, reward=scores, batch=replace(batch, routes=None))
        turns = {} if stages.host_turns is None else stages.host_turns.seconds
        return (with_frozen(state, *kept), scored, metrics | losses | turns), seconds

    def start_compiling(self, state: TrainState, prompts: Prompts) -> None:
        """Start to compile all stages, beside each other and beside what runs. Arguments as of `TrainStep.lower`."""
        if not self._programs:
            self._make_programs(state)
        stages, programs = self.stages, self._programs
        rows, everywhere = (NamedSharding(stages.mesh, axes) for axes in (P(BATCH_AXES), P()))
        with jax.set_mesh(stages.mesh):
            params = joined(copy_on(stages.mesh, stages.policy, stages.drafter, state.params))
            chosen = shapes_on(everywhere, jax.eval_shape(stages.choose, state))
        prompts = abstract_prompts(prompts, stages.mesh)
        if self._host_turns is not None:
            generated = start_compiling_turns(self._host_turns, stages, state, prompts)
        else:
            generated = programs["generate"].start_compiling(params, prompts, state.step, chosen, state.carried)
        rollout = shapes_on(rows, generated)
        if isinstance(stages.reward_fn, HostReward):
            scores = stages.reward_fn.shapes(rollout)
        else:
            scores = shapes_on(rows, programs["reward"].start_compiling(rollout, prompts))
        _, sequences, _ = programs["select"].start_compiling(rollout, prompts, scores)
        sequences = shapes_on(rows, sequences)
        log_probs = shapes_on(rows, programs["logprob"].start_compiling(state, sequences))
        args = with_frozen(state), frozen(state), sequences, log_probs, prompts, rollout
        programs["train"].start_compiling(*args)

    def prepare(self, state: TrainState) -> tuple[Params, float]:
        """Return the parameters prepared for the rollout, and the seconds it took."""
        with jax.set_mesh(self.stages.mesh):
            if self._prepare is None:
                self._prepare = make_prepare(self.stages.policy, self.stages.drafter, state.params)
                jax.block_until_ready(self._prepare(state.params))
                self._timed.start()
            return self._timed.on_host(self._prepare, state.params)

    def _make_programs(self, state: TrainState) -> None:
        """Make the programs of the stages. States keep the sharding of this one."""
        stages, rows = self.stages, NamedSharding(self.stages.mesh, P(BATCH_AXES))
        layout = jax.tree.map(lambda x: x.sharding, with_frozen(state))
        functions: dict[str, tuple[Callable, dict[str, Any]]] = {
            "generate": (stages.generate, {"out_shardings": rows}),
            "reward": (stages.reward, {"out_shardings": rows}),
            "select": (self._select, {"in_shardings": rows, "out_shardings": (rows, rows, None)}),
            "logprob": (stages.logprob, {"out_shardings": rows}),
            "train": (self._train, {"out_shardings": (layout, None, None), "donate_argnums": 0}),
        }
        for name, (run, options) in functions.items():
            self._programs[name] = Program(run, stages.mesh, compute_dtype=stages.policy.dtype, **options)

    def _select(self, rollout: Rollout, prompts: Prompts, scores: Reward) -> tuple[Reward, ScoredSequences, Metrics]:
        scores = withhold_rewards(scores, rollout, self.stages.config.rollout)
        return scores, *self.stages.select(rollout, prompts, scores)

    def _train(
        self,
        state: TrainState,
        kept: tuple[PyTree, PyTree],
        sequences: ScoredSequences,
        log_probs: LogProbs,
        prompts: Prompts,
        rollout: Rollout,
    ) -> tuple[TrainState, TrainBatch, Metrics]:
        batch = self.stages.advantage(sequences, log_probs)
        state, losses = self.stages.update(with_frozen(state, *kept), batch)
        return self.stages.remember(with_frozen(state), prompts, rollout, losses), batch, losses


def frozen(state: TrainState) -> tuple[PyTree, PyTree]:
    """Return what no step changes: the base of adapters, and the teacher."""
    return state.params.base, state.teacher


def with_frozen(state: TrainState, base: PyTree = (), teacher: PyTree = None) -> TrainState:
    """Return the state with these frozen weights, by default with none: they are then neither donated nor copied."""
    return replace(state, params=replace(state.params, base=base), teacher=teacher)


class ProbeStep:
    """Step that is called like the fused one and adds stage times in seconds and the speed-up to the metrics.

    `time/prepare`, `time/generation`, `time/reward`, `time/logprob` and `time/train` are those of `StagedStep`, and
    `time/step` is their sum. For `perf/speedup_vs_autoregressive` the same prompts are generated again at draft length
    0. `time/teacher` is one run of the teacher over the batch, a part of `time/train`. A step's time excludes both,
    compilation, and the first run of a rollout. It includes the first run of another program, unless `rehearse` has run
    it before. The state is donated.
    """

    def __init__(self, stages: Stages) -> None:
        config, rollout = stages.config, stages.config.rollout
        plain = replace(config, rollout=replace(rollout, draft_length=0, draft_lengths=()))
        self._mesh, self._timed, self._step = stages.mesh, Clock(), StagedStep(stages)
        self._plain = replace(stages, config=plain)
        program = partial(Program, mesh=stages.mesh, compute_dtype=stages.policy.dtype)
        self._generate_plain = program(self._plain.generate)
        self._plain_turns = self._plain.host_turns
        self._teacher = None if stages.teacher is None else program(stages.run_teacher)

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        prompts = place(prompts, self._mesh)
        params, _ = self._step.prepare(state)
        self._timed.start()
        if self._plain_turns is not None:
            args = params, prompts, self._plain.seed_step(state.step)
            plain, plain_s = self._timed.on_host(self._plain_turns.generate, *args)
        else:
            args = params, prompts, state.step, None, state.carried
            plain, plain_s = self._timed(self._generate_plain, *args, pure=True)
        del params
        (state, rollout, metrics), seconds = self._step(state, prompts)
        speed = int(rollout.written.sum()) / seconds["generation"]
        times: dict[str, Any] = {f"time/{stage}": value for stage, value in seconds.items()}
        times |= {
            "time/step": sum(seconds.values()),
            "perf/generation_tokens_per_s": speed,
            "perf/speedup_vs_autoregressive": speed / (int(plain.written.sum()) / plain_s),
        }
        if self._teacher is not None:
            self._timed.start()
            _, times["time/teacher"] = self._timed(self._teacher, state, rollout.batch, pure=True)
        return state, rollout, metrics | times

    def rehearse(self, state: TrainState, prompts: Prompts) -> StepResult:
        """Run a step with the programs that a probe times; of the times, add `time/step` alone to the metrics."""
        (state, rollout, metrics), seconds = self._step(state, prompts)
        total: dict[str, Any] = {"time/step": sum(seconds.values())}
        return state, rollout, metrics | total
