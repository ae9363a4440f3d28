"""One answer, as it is generated: the rounds of the rollout, a few at a time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from launch.build.experiment import Experiment
from specjax import kernels
from specjax.keys import SeedStep
from specjax.rollout.generate import place, prepare
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import start_rollout
from specjax.types import Params, Prompts

ROUNDS = 4  # between two looks at what was emitted


def stream_rounds(
    experiment: Experiment, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Iterator[RoundState]:
    """Yield the state of a rollout after its prefill and after every few rounds; the tokens are those of a rollout.

    prompts: one, for each data shard. The states have a row for each sequence.
    """
    networks, mesh = experiment.networks, experiment.mesh
    slots = len(prompts.lengths) * config.group_size

    def decoding(params: Params) -> Decoding:
        return Decoding(networks.policy, networks.drafter, prepare(params, networks.policy.dtype), config)

    with jax.set_mesh(mesh):
        options = kernels.compiler_options(networks.policy.dtype)

        @partial(jax.jit, compiler_options=options)
        def start(params: Params, prompts: Prompts, seed_step: SeedStep) -> RoundState:
            return start_rollout(decoding(params), prompts, seed_step, slots).state

        @partial(jax.jit, donate_argnums=1, compiler_options=options)
        def advance(params: Params, state: RoundState) -> RoundState:
            stop = lambda state, count: state.done.all() | (count >= ROUNDS)  # noqa: E731
            return rounds(decoding(params), state, config.draft_length, stop)[0]

        params = replace(params, memory=())
        state = start(params, place(prompts, mesh), seed_step)
        yield state
        while not bool(np.all(state.done)):
            state = advance(params, state)
            yield state
