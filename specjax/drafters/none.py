"""No drafter: for runs whose draft length is always 0."""

from dataclasses import dataclass

from jaxtyping import Array

from specjax.drafters.base import Drafter, DraftState, Flag, Proposal
from specjax.sampling import SamplingLaw
from specjax.types import Params, Prompts


@dataclass(frozen=True)
class NoDrafter(Drafter):
    """Drafter without state and parameters. Raises ValueError when asked to propose."""

    proposes = False

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> DraftState:
        return ()

    def propose(
        self, params: Params, state: DraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        raise ValueError(f"draft_length = {gumbel.shape[1]}: must be 0 without a drafter")

    def observe(self, state: DraftState, features: Array, tokens: Array, emitted: Array) -> DraftState:
        return state
