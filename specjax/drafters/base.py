"""The protocol that every drafter follows."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts, PyTree, Rollout

DraftState = PyTree


class Proposal(NamedTuple):
    """What a drafter proposes for a round.

    tokens: int32 [B, K].
    log_q:  float32 [B, K, V], the log-probs each token was sampled from, over the policy's vocabulary: minus infinity
            where the drafter has no mass, one-hot (0 at the token) where it is deterministic.
    length: int32 [B], 0 .. K, how many of the tokens count. It may depend on the committed prefix and stop after a
            sampled token, never drop one already looked at: that would bias the law.
    predicted: bool [B], rows of whose first token `DraftLoss.overlap` predicts the acceptance; None for all.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K V"]
    length: Int[Array, "B"]
    predicted: Bool[Array, "B"] | None = None


class DraftLoss(NamedTuple):
    """Of one microbatch.

    loss:    scalar, the sum over its tokens, to be divided by the global count; differentiable in the draft's
             parameters alone.
    overlap: float32 [B, T], sum_v min(p, q) of the laws that each token is drawn from by the policy and drafted from:
             the acceptance to expect where it stands at position 1 of a draft. 0 where the token does not count.
    """

    loss: Float[Array, ""]
    overlap: Float[Array, "B T"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens, is told what became of them, and can be distilled from the policy.

    A drafter is a set of functions over its own state, a pytree whose arrays have the row as leading axis. Those that
    have a default here are inherited by a subclass: one without parameters need only start, propose and observe.
    """

    def features(self, output: PolicyOutput) -> Float[Array, "B T F"]:
        """What it reads of a forward of the policy; by default nothing, F = 0."""
        return output.hidden[..., :0]

    def start(self, params: Params, prompts: Prompts, features: Float[Array, "N P F"], width: int) -> DraftState:
        """The state after the policy's prefill of `prompts`, before `observe` is told of the first sampled token.

        width: K + 1, the most tokens that one verification emits. A cache in the state (specjax.types.LayerCache) has
        room for the prompt and for what the drafter itself writes beyond; the rollout resizes it by as many positions
        as the policy's, from the prompt's padded length on. So it does with a TextCache.
        """
        ...

    def start_without_drafting(self, params: Params, prompts: Prompts, blank: DraftState) -> DraftState:
        """The state after a prefill of `prompts` that begin at draft length 0; `blank` is that of `start`, in zeros.

        By default that is it: rows know nothing until `catch_up`. One that reads the prompts' tokens alone begins here.
        """
        return blank

    def observe_finished(self, state: DraftState, prompts: Prompts, finished: Int[Array, "B G C"]) -> DraftState:
        """Take in what has ended of each row's group, by sample, as texts hold it (specjax.drafters.lookup).

        prompts: of the rows. Called where sequences leave their rows before the rollout ends, as they are refilled or
        given up, and at its start, with nothing finished, so that the state can make room. By default it is not heard.
        """
        return state

    def catch_up(
        self, state: DraftState, visible: Int[Array, "B"], tokens: Int[Array, "B S"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Take in what rounds at draft length 0, which hold no drafter's work, have brought the rows to.

        visible: positions that the policy has cached of them. tokens: of which the first `emitted` are the completion,
        and the last of these stands at position `visible`. Called where draft lengths may be 0, before rounds that
        draft; and where they are chosen, of a drafter without parameters, after the rollout for what had been known
        before (specjax.rollout.lookup_acceptance). One that reads the tokens alone misses nothing; one that reads
        features starts again at `visible` where it was not told of some. By default it is told of all it needs.
        """
        return state

    def known_from(self, state: DraftState) -> Int[Array, "B"] | None:
        """The first position that each row's state knows of; 0 for all of it, as None is for all rows.

        Rows that `catch_up` started anew draft from less than the training forward sees, and are not held against it.
        """
        return None

    def propose(
        self, params: Params, state: DraftState, gumbel: Float[Array, "B K V"], law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        """K tokens for each row, sampled with the given noise from its own processed law."""
        ...

    def observe(
        self, state: DraftState, features: Float[Array, "B T F"], tokens: Int[Array, "B T"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Take in a verification: its T <= K + 1 rows of features, the emitted tokens d1 .. dm, y and their number.

        features[b, i] belongs to the position before tokens[b, i]. `emitted` is m + 1, or 0 for a finished row, whose
        state then stands still. The prefill counts as a verification of the prompt's last token alone, T = 1.
        """
        ...

    def loss(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        output: PolicyOutput,
        mask: Bool[Array, "B T"],
        law: SamplingLaw,
    ) -> DraftLoss:
        """Distillation from a teacher-forced forward of the policy, which arrives behind stop_gradient.

        mask: which tokens are completion tokens; a prediction counts where the token it predicts does. By default there
        is nothing to distil, and nothing is promised.
        """
        return DraftLoss(jnp.float32(0), jnp.zeros(tokens.shape, jnp.float32))

    def blank_memory(self, prompts: int, max_new_tokens: int) -> PyTree:
        """`Params.memory` before the first rollout, for prompt ids 0 .. prompts - 1; by default there is none."""
        return ()

    def remember(self, memory: PyTree, prompts: Prompts, rollout: Rollout) -> PyTree:
        """`Params.memory` after a rollout, in the fused program and over all shards; by default as it was."""
        return memory
