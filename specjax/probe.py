"""A step run stage by stage against the clock: the same functions, tokens and gradients as the fused program."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.drafters import Drafter
from specjax.generate import RolloutFn, place
from specjax.mesh import BATCH_AXES
from specjax.rewards import RewardFn
from specjax.rollout import speculative_rollout
from specjax.stages import TrainConfig, make_stages
from specjax.train_step import StepResult, chosen_lengths, with_experience
from specjax.types import Policy, Prompts, TrainState


class ProbeStep:
    """Called as the fused step is, it adds stage times in seconds and the speed-up to the metrics.

    `time/prepare` gathers and casts the parameters, `time/generation` is the rollout alone, `time/logprob` the
    reference policy's forward, `time/train` forward, backward and updates, `time/step` the sum of all stages.
    `perf/speedup_vs_autoregressive` generates the same prompts again at draft length 0. Neither that nor compilation,
    on first use, is part of a step's time. The state is donated.
    """

    def __init__(
        self,
        policy: Policy,
        drafter: Drafter,
        reward_fn: RewardFn,
        config: TrainConfig,
        mesh: Mesh,
        rollout_fn: RolloutFn = speculative_rollout,
    ) -> None:
        plain = replace(config, rollout=replace(config.rollout, draft_length=0, draft_lengths=()))
        self._mesh, self._drafter, self._config = mesh, drafter, config
        self._stages = make_stages(policy, drafter, reward_fn, config, mesh, rollout_fn)
        self._plain = make_stages(policy, drafter, reward_fn, plain, mesh, rollout_fn)
        self._compiled: dict[str, jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        with jax.set_mesh(self._mesh):
            return self._run(state, place(prompts, self._mesh))

    def _run(self, state: TrainState, prompts: Prompts) -> StepResult:
        layout = jax.tree.map(lambda x: x.sharding, state)
        gathered = jax.tree.map(self._without_batch_axes, layout.params)
        stages = self._stages
        params, prepare_s = self._timed("prepare", stages.prepare, state.params, out_shardings=gathered)
        chosen = chosen_lengths(state, self._config)
        rollout, generation_s = self._timed("generate", stages.generate, params, prompts, state.step, chosen)
        plain, plain_s = self._timed("generate_plain", self._plain.generate, params, prompts, state.step, None)
        (batch, metrics), reward_s = self._timed("reward", stages.reward, rollout, prompts)
        batch, logprob_s = self._timed("logprob", stages.logprob, state, batch)
        del params  # The fused program has no gathered copy left by now, and its memory is what a mesh is chosen for.
        (state, losses), train_s = self._timed(
            "update", stages.update, state, batch, out_shardings=(layout, None), donate_argnums=0
        )
        speed = int(rollout.lengths.sum()) / generation_s
        times = {
            "time/prepare": prepare_s,
            "time/generation": generation_s,
            "time/logprob": logprob_s,
            "time/train": train_s,
            "time/step": prepare_s + generation_s + reward_s + logprob_s + train_s,
            "perf/generation_tokens_per_s": speed,
            "perf/speedup_vs_autoregressive": speed / (int(plain.lengths.sum()) / plain_s),
        }
        state = with_experience(state, prompts, rollout, losses, self._drafter, self._config)
        return state, rollout, metrics | losses | times

    def _timed(self, name: str, stage: Callable, *args: Any, **jit_options: Any) -> tuple[Any, float]:
        if name not in self._compiled:
            self._compiled[name] = jax.jit(stage, **jit_options).lower(*args).compile()
        jax.block_until_ready(args)
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[name](*args))
        return result, time.perf_counter() - start

    def _without_batch_axes(self, sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(self._mesh, P(*(None if _overlaps(axes) else axes for axes in sharding.spec)))


def _overlaps(axes: str | tuple[str, ...] | None) -> bool:
    names = axes if isinstance(axes, tuple) else (axes,)
    return bool(set(names) & set(BATCH_AXES))
