"""No drafter: for runs whose draft length is always 0."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.base import DraftLoss, DraftState, Proposal
from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts


@dataclass(frozen=True)
class NoDrafter:
    """Has no state and no parameters, and refuses to propose."""

    def start(self, params: Params, prompts: Prompts, features: Array, width: int) -> DraftState:
        return ()

    def align(self, state: DraftState, visible: Array) -> DraftState:
        return state

    def propose(
        self, params: Params, state: DraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        raise ValueError(f"draft_length = {gumbel.shape[1]}: must be 0 without a drafter")

    def observe(self, state: DraftState, features: Array, tokens: Array, emitted: Array) -> DraftState:
        return state

    def loss(self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw) -> DraftLoss:
        return DraftLoss(jnp.float32(0), jnp.float32(0))
