"""A step run stage by stage against the clock: the same functions, tokens and gradients as the fused program."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax import kernels
from specjax.rollout.generate import Choice, gathered_shardings, place
from specjax.train.batch import ScoredSequences, TrainBatch
from specjax.train.metrics import Metrics
from specjax.train.stages import LogProbs, Stages
from specjax.train.train_step import StepResult
from specjax.types import Params, Prompts, PyTree, Rollout, TrainState

Seconds = dict[str, float]


class Clock:
    """Functions compiled on first use, as the fused program is, and run to their end, one after the other."""

    def __init__(self, dtype: jnp.dtype) -> None:
        self._dtype = dtype
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._last = 0.0

    def start(self) -> None:
        """The next call begins now."""
        self._last = time.perf_counter()

    def __call__(
        self, name: str, run: Callable, *args: PyTree, pure: bool = False, **jit_options: Any
    ) -> tuple[Any, float]:
        """Return the result of `run(*args)`, and the seconds since the previous call ended, so that they add up.

        Compiling, the first time that a name comes, is not in them, nor, where nothing is donated and no host is
        asked (`pure`), the first run, which is slower than later ones.
        """
        if name not in self._compiled:
            program = jax.jit(run, compiler_options=kernels.compiler_options(self._dtype), **jit_options)
            self._compiled[name] = program.lower(*args).compile()
            if pure:
                jax.block_until_ready(self._compiled[name](*args))
            self.start()
        result = jax.block_until_ready(self._compiled[name](*args))
        seconds = time.perf_counter() - self._last
        self._last += seconds
        return result, seconds


class StagedStep:
    """Called as the fused step is, it returns the step's result and the seconds of each stage, in their order.

    `prepare` gathers and casts the parameters, `generation` is the rollout alone, `reward` the scores and what is
    selected by them, `logprob` the forwards of policies that are not trained, `train` the advantages, and forward,
    backward and updates.
    Compilation, on first use, is in none of them, nor the first run of a rollout; the first run of another program is,
    which is slower than later ones. The state is donated.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages, self._timed = stages, Clock(stages.policy.dtype)
        self._layout = self._gathered = None

    def __call__(self, state: TrainState, prompts: Prompts, chosen: Choice = None) -> tuple[StepResult, Seconds]:
        """chosen: the draft length of each phase, an index; None leaves the choice to the state."""
        stages, seconds = self._stages, {}
        if chosen is None:
            chosen = stages.choose(state)
        jax.block_until_ready((state, chosen))
        self._timed.start()
        with jax.set_mesh(stages.mesh):
            prompts = place(prompts, stages.mesh)
            params, seconds["prepare"] = self.prepare(state)
            rollout, seconds["generation"] = self._timed(
                "generate", stages.generate, params, prompts, state.step, chosen, pure=True
            )
            # The fused program has no gathered copy left by now, and its memory is what a mesh is chosen for.
            del params
            (scores, sequences, metrics), seconds["reward"] = self._timed("reward", stages.reward, rollout, prompts)
            log_probs, seconds["logprob"] = self._timed("logprob", stages.logprob, state, sequences)
            train = state, sequences, log_probs, prompts, rollout
            options: dict[str, Any] = dict(out_shardings=(self._layout, None, None), donate_argnums=0)
            (state, batch, losses), seconds["train"] = self._timed("train", self._train, *train, **options)
        return (state, replace(rollout, reward=scores, batch=batch), metrics | losses), seconds

    def prepare(self, state: TrainState) -> tuple[Params, float]:
        """Return the parameters as the rollout takes them, on the mesh that is set, and the seconds that it took."""
        if self._layout is None:
            self._layout = jax.tree.map(lambda x: x.sharding, state)
            self._gathered = gathered_shardings(state.params)
        return self._timed("prepare", self._stages.prepare, state.params, out_shardings=self._gathered)

    def _train(
        self, state: TrainState, sequences: ScoredSequences, log_probs: LogProbs, prompts: Prompts, rollout: Rollout
    ) -> tuple[TrainState, TrainBatch, Metrics]:
        batch = self._stages.advantage(sequences, log_probs)
        state, losses = self._stages.update(state, batch)
        return self._stages.remember(state, prompts, rollout, losses), batch, losses


class ProbeStep:
    """Called as the fused step is, it adds stage times in seconds and the speed-up to the metrics.

    `time/prepare`, `time/generation`, `time/reward`, `time/logprob` and `time/train` are those of `StagedStep`,
    `time/step` is their sum. `perf/speedup_vs_autoregressive` generates the same prompts again at draft length 0.
    Neither that nor compilation, on first use, is part of a step's time, nor the first run of a rollout. Those of other
    programs are, but where the step before was a rehearsal (`rehearse`). The state is donated.
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
            plain, plain_s = self._timed("generate", self._generate_plain, params, prompts, state.step, None, pure=True)
            del params
        (state, rollout, metrics), seconds = self._step(state, prompts)
        speed = int(rollout.lengths.sum()) / seconds["generation"]
        times: dict[str, Any] = {f"time/{stage}": value for stage, value in seconds.items()}
        times |= {
            "time/step": sum(seconds.values()),
            "perf/generation_tokens_per_s": speed,
            "perf/speedup_vs_autoregressive": speed / (int(plain.lengths.sum()) / plain_s),
        }
        return state, rollout, metrics | times

    def rehearse(self, state: TrainState, prompts: Prompts) -> StepResult:
        """A step by the programs that a probe times, whose metrics have the seconds of all of it alone."""
        (state, rollout, metrics), seconds = self._step(state, prompts)
        whole: dict[str, Any] = {"time/step": sum(seconds.values())}
        return state, rollout, metrics | whole
