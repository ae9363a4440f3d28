"""Training steps run stage by stage and timed, with the same functions, tokens and gradients as the fused program."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax import kernels
from specjax.rewards import HostReward
from specjax.rollout.generate import Choice, make_prepare, place
from specjax.train.batch import ScoredSequences, TrainBatch
from specjax.train.metrics import Metrics
from specjax.train.selection import withhold_rewards
from specjax.train.stages import LogProbs, Stages
from specjax.train.train_step import StepResult
from specjax.types import Params, Prompts, PyTree, Rollout, TrainState

Seconds = dict[str, float]


class Clock:
    """Compiles functions on first use, with the options of the fused program, and times each run to its end."""

    def __init__(self, dtype: jnp.dtype) -> None:
        self._dtype = dtype
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._last = 0.0

    def start(self) -> None:
        """Start the clock: the seconds of the next call count from now."""
        self._last = time.perf_counter()

    def __call__(
        self, name: str, run: Callable, *args: PyTree, pure: bool = False, **jit_options: Any
    ) -> tuple[Any, float]:
        """Return the result of `run(*args)`, and the seconds since the previous call ended, so that they add up.

        They exclude compilation, on the first call with a name. With `pure` they exclude the first run too, which is
        slower than later ones: allowed if nothing is donated and the host is not called.
        """
        if name not in self._compiled:
            program = jax.jit(run, compiler_options=kernels.compiler_options(self._dtype), **jit_options)
            self._compiled[name] = program.lower(*args).compile()
            if pure:
                jax.block_until_ready(self._compiled[name](*args))
            self.start()
        return self.on_host(self._compiled[name], *args)

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
        self.stages, self._timed = stages, Clock(stages.policy.dtype)
        self._layout: PyTree = None
        self._prepare: Callable[[Params], Params] | None = None

    def __call__(self, state: TrainState, prompts: Prompts, chosen: Choice = None) -> tuple[StepResult, Seconds]:
        """Take a step stage by stage. chosen: index of each phase's draft length; None: `Stages.choose` picks it."""
        stages, seconds = self.stages, {}
        if chosen is None:
            chosen = stages.choose(state)
        jax.block_until_ready((state, chosen))
        self._timed.start()
        with jax.set_mesh(stages.mesh):
            prompts = place(prompts, stages.mesh)
            params, seconds["prepare"] = self.prepare(state)
            rollout, seconds["generation"] = self._timed(
                "generate", stages.generate, params, prompts, state.step, chosen, state.carried, pure=True
            )
            # Free the gathered copy, as the fused program has done by now: meshes are chosen for its memory.
            del params
            if isinstance(stages.reward_fn, HostReward):
                scores, scoring_s = self._timed.on_host(stages.reward, rollout, prompts)
            else:
                scores, scoring_s = self._timed("reward", stages.reward, rollout, prompts)
            scores = withhold_rewards(scores, rollout, stages.config.rollout)
            (sequences, metrics), selecting_s = self._timed("select", stages.select, rollout, prompts, scores)
            seconds["reward"] = scoring_s + selecting_s
            log_probs, seconds["logprob"] = self._timed("logprob", stages.logprob, state, sequences)
            base = state.params.base
            train = with_base(state, ()), base, sequences, log_probs, prompts, rollout
            options: dict[str, Any] = dict(out_shardings=(self._layout, None, None), donate_argnums=0)
            (state, batch, losses), seconds["train"] = self._timed("train", self._train, *train, **options)
            state = with_base(state, base)
        kept = replace(batch, routes=None)
        return (state, replace(rollout, reward=scores, batch=kept), metrics | losses), seconds

    def prepare(self, state: TrainState) -> tuple[Params, float]:
        """Return the parameters prepared for the rollout, and the seconds it took. Call with the mesh set."""
        if self._prepare is None:
            self._layout = jax.tree.map(lambda x: x.sharding, with_base(state, ()))
            self._prepare = make_prepare(self.stages.policy, self.stages.drafter, state.params)
            jax.block_until_ready(self._prepare(state.params))
            self._timed.start()
        return self._timed.on_host(self._prepare, state.params)

    def _train(
        self,
        state: TrainState,
        base: PyTree,
        sequences: ScoredSequences,
        log_probs: LogProbs,
        prompts: Prompts,
        rollout: Rollout,
    ) -> tuple[TrainState, TrainBatch, Metrics]:
        batch = self.stages.advantage(sequences, log_probs)
        state, losses = self.stages.update(with_base(state, base), batch)
        return self.stages.remember(with_base(state, ()), prompts, rollout, losses), batch, losses


def with_base(state: TrainState, base: PyTree) -> TrainState:
    """Return the state with `base` as the frozen base of its adapters."""
    return replace(state, params=replace(state.params, base=base))


class ProbeStep:
    """Step that is called like the fused one and adds stage times in seconds and the speed-up to the metrics.

    `time/prepare`, `time/generation`, `time/reward`, `time/logprob` and `time/train` are those of `StagedStep`, and
    `time/step` is their sum. For `perf/speedup_vs_autoregressive` the same prompts are generated again at draft length
    0. A step's time excludes that rollout, compilation, and the first run of a rollout. It includes the first run of
    another program, unless `rehearse` has run it before. The state is donated.
    """

    def __init__(self, stages: Stages) -> None:
        config, rollout = stages.config, stages.config.rollout
        plain = replace(config, rollout=replace(rollout, draft_length=0, draft_lengths=()))
        self._mesh, self._timed, self._step = stages.mesh, Clock(stages.policy.dtype), StagedStep(stages)
        self._generate_plain = replace(stages, config=plain).generate

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        with jax.set_mesh(self._mesh):
            prompts = place(prompts, self._mesh)
            params, _ = self._step.prepare(state)
            self._timed.start()
            args = params, prompts, state.step, None, state.carried
            plain, plain_s = self._timed("generate", self._generate_plain, *args, pure=True)
            del params
        (state, rollout, metrics), seconds = self._step(state, prompts)
        speed = int(rollout.written.sum()) / seconds["generation"]
        times: dict[str, Any] = {f"time/{stage}": value for stage, value in seconds.items()}
        times |= {
            "time/step": sum(seconds.values()),
            "perf/generation_tokens_per_s": speed,
            "perf/speedup_vs_autoregressive": speed / (int(plain.written.sum()) / plain_s),
        }
        return state, rollout, metrics | times

    def rehearse(self, state: TrainState, prompts: Prompts) -> StepResult:
        """Run a step with the programs that a probe times; of the times, add `time/step` alone to the metrics."""
        (state, rollout, metrics), seconds = self._step(state, prompts)
        total: dict[str, Any] = {"time/step": sum(seconds.values())}
        return state, rollout, metrics | total
