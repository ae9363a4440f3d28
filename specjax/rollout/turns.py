"""Turns of sequences with an environment: what a row waits for, and why it ended."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from specjax.environments import Environment
from specjax.keys import environment_keys
from specjax.rollout.plan import RolloutConfig
from specjax.types import Ending, Prompts, PyTree, pytree


@pytree
class Turns:
    """Turns of the rows of a rollout.

    Attributes:
        number:      int32 [B], turns that have ended.
        observed:    int32 [B], completion tokens that were observed.
        began:       int32 [B], completion tokens before the turn.
        waiting:     bool [B], the turn has ended and the environment has not answered.
        ending:      int8 [B], the `Ending` of the sequence.
        returns:     float32 [B], sum of the rewards so far.
        environment: State of an environment in JAX.
    """

    number: Int[Array, "B"]
    observed: Int[Array, "B"]
    began: Int[Array, "B"]
    waiting: Bool[Array, "B"]
    ending: Int[Array, "B"]
    returns: Array
    environment: PyTree

    def after(self, stopped: Bool[Array, "B"], spent: Bool[Array, "B"]) -> "Turns":
        """Return the turns after tokens were drawn. stopped: they ended a turn. spent: they reached a budget first."""
        ending = jnp.where(spent, Ending.LENGTH, self.ending).astype(jnp.int8)
        return replace(self, waiting=self.waiting | stopped, ending=ending)


def begin_turns(config: RolloutConfig, prompts: Prompts, keys: UInt32[Array, "B 2"]) -> Turns | None:
    """Return the turns of rows that begin; None without an environment. keys: of the sequences."""
    environment = config.environment
    if environment is None:
        return None
    zeros = jnp.zeros(len(keys), jnp.int32)
    return Turns(
        number=zeros,
        observed=zeros,
        began=zeros,
        waiting=zeros > 0,
        ending=zeros.astype(jnp.int8),
        returns=zeros.astype(jnp.float32),
        environment=environment.begin(prompts, environment_keys(keys)) if isinstance(environment, Environment) else (),
    )
