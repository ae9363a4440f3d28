"""Streaming of one answer: the rounds of its rollout, a few at a time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax

from launch.setup.experiment import Experiment
from specjax import kernels
from specjax.keys import SeedStep
from specjax.rollout.generate import make_prepare, place
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import start_rollout
from specjax.types import Params, Prompts

ROUNDS = 4  # per call of the compiled program


def stream_rounds(
    experiment: Experiment, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Iterator[RoundState]:
    """Yield the state of a rollout after its prefill and after every few rounds, until its first row has ended.

    The tokens are the same as from `Sampler.generate`.

    prompts: one per data shard; only the first is shown, the others fill the mesh.
    """
    # Use the policy that is trained, not an 8-bit copy of it for rollouts.
    policy, drafter = replace(experiment.networks.policy, eight_bit=None, merged=False), experiment.networks.drafter
    mesh = experiment.mesh
    slots = len(prompts.lengths) * config.group_size

    def decoding(prepared: Params) -> Decoding:
        return Decoding(policy, drafter, prepared, config)

    with jax.set_mesh(mesh):
        options = kernels.compiler_options(policy.dtype)

        @partial(jax.jit, compiler_options=options)
        def start(prepared: Params, prompts: Prompts, seed_step: SeedStep) -> RoundState:
            return start_rollout(decoding(prepared), prompts, seed_step, slots).state

        @partial(jax.jit, donate_argnums=1, compiler_options=options)
        def advance(prepared: Params, state: RoundState) -> RoundState:
            stop = lambda state, count: state.done[0] | (count >= ROUNDS)  # noqa: E731
            return rounds(decoding(prepared), state, config.draft_length, stop)[0]

        params = replace(params, memory=(), draft=params.draft if config.draft_length else {})
        prepared = make_prepare(policy, drafter, params)(params)
        state = start(prepared, place(prompts, mesh), seed_step)
        yield state
        while not bool(state.done[0]):
            state = advance(prepared, state)
            yield state
