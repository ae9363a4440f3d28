"""The protocol that every drafter follows."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts, PyTree, Rollout

DraftState = PyTree
# A static bool, or a traced one where draft lengths are chosen.
# A traced or a Python boolean.
Flag = Bool[Array, ""] | bool
T = TypeVar("T")


class Proposal(NamedTuple):
    """Tokens proposed for one round.

    tokens: int32 [B, K].
    log_q:  float32 [B, K, V], the log-probs each token was sampled from, over the policy's vocabulary: minus infinity
            where the drafter has no mass, one-hot (0 at the token) where it is deterministic.
    length: int32 [B], 0 .. K, how many of the tokens count. It may depend on the committed prefix and stop after a
            sampled token, never drop one already looked at: that would bias the law.
    predicted: bool [B], rows of whose first token `DraftLoss.overlap` predicts the acceptance: not those drafted from
            less context than the training forward sees. None for all rows.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K V"]
    length: Int[Array, "B"]
    predicted: Bool[Array, "B"] | None = None


class DraftLoss(NamedTuple):
    """Result of the draft's loss for one microbatch.

    loss:    scalar, the sum over its tokens, to be divided by the global count; differentiable in the draft's
             parameters alone.
    overlap: float32 [B, T], sum_v min(p, q) of the laws that each token is drawn from by the policy and drafted from:
             the acceptance to expect where it stands at position 1 of a draft. 0 where the token does not count.
    """

    loss: Float[Array, ""]
    overlap: Float[Array, "B T"]


@runtime_checkable
class Memory(Protocol):
    """A drafter's memory of earlier rollouts, as functions over `Params.memory`."""

    def blank(self, prompts: int, max_new_tokens: int) -> PyTree:
        """Return the memory before the first rollout, for prompt ids 0 .. prompts - 1."""
        ...

    def remember(self, memory: PyTree, prompts: Prompts, rollout: Rollout) -> PyTree:
        """Return the memory after a rollout: called in the fused program, over all shards."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens, observes what became of them, and can be distilled from the policy.

    A drafter is a set of functions over its own state, a pytree whose arrays have the row as leading axis. A drafter
    without parameters needs `start`, `propose` and `observe`; a subclass inherits defaults for the others.
    """

    @property
    def memory(self) -> Memory | None:
        """Return its memory of earlier rollouts; None for most drafters."""
        return None

    def features(self, output: PolicyOutput) -> Float[Array, "B T F"]:
        """Return what it reads of a forward of the policy; by default nothing, F = 0."""
        return output.hidden[..., :0]

    def start(
        self,
        params: Params,
        prompts: Prompts,
        features: Float[Array, "N P F"],
        width: int,
        drafting: Flag = True,
    ) -> DraftState:
        """Return the state after the policy's prefill of `prompts`, before `observe` gets the first sampled token.

        width: K + 1, the most tokens that one verification emits. A cache in the state (specjax.types.LayerCache) has
        room for the prompt and for what the drafter itself writes beyond; the rollout resizes it by as many positions
        as the policy's, from the prompt's padded length on. So it does with a TextCache.
        drafting: False where the rollout starts at draft length 0. `catch_up` comes before any draft, so that work may
        be left out (`start_if`).
        """
        ...

    def catch_up(
        self, state: DraftState, visible: Int[Array, "B"], tokens: Int[Array, "B S"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Return the state after rounds at draft length 0, which do not call the drafter.

        visible: positions that the policy has cached of each row. tokens: of which the first `emitted` are the
        completion, and the last of these stands at position `visible`. Called where draft lengths may be 0, before
        rounds that draft; and where they are chosen, of a drafter without parameters, after the rollout with fewer
        tokens than there are (specjax.rollout.lookup_acceptance). A drafter that reads tokens takes them in; one that
        reads features starts again at `visible` in the rows that missed some. By default nothing was missed.
        """
        return state

    def propose(
        self, params: Params, state: DraftState, gumbel: Float[Array, "B K V"], law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        """Return K tokens for each row, sampled with the given noise from its own processed law, and the state."""
        ...

    def observe(
        self, state: DraftState, features: Float[Array, "B T F"], tokens: Int[Array, "B T"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Return the state after a verification, which emitted the first `emitted` of `tokens`: d1 .. dm, y.

        features[b, i] belongs to the position before tokens[b, i]; T <= K + 1. `emitted` is m + 1, or 0 for a finished
        row, whose state must not change. The prefill counts as a verification of the prompt's last token, T = 1.
        """
        ...

    def observe_finished(self, state: DraftState, prompts: Prompts, finished: Int[Array, "B G C"]) -> DraftState:
        """Return the state after samples of the row's prompt have ended: by default the same.

        prompts: of the rows. finished: by sample, as texts hold them (specjax.drafters.lookup), without the row's own.
        Called where rows are refilled or given up before the rollout ends, and at its start with nothing finished, so
        that the state can make room.
        """
        return state

    def loss(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        output: PolicyOutput,
        mask: Bool[Array, "B T"],
        law: SamplingLaw,
    ) -> DraftLoss:
        """Return the distillation loss of a teacher-forced forward of the policy, which has no gradient into it.

        mask: which tokens are completion tokens; a prediction counts where the token it predicts does. By default there
        is nothing to distil, and the predicted acceptance is 0.
        """
        return DraftLoss(jnp.float32(0), jnp.zeros(tokens.shape, jnp.float32))


def start_if(drafting: Flag, start: Callable[[], T]) -> T:
    """Return `start()`, or zeros of its shapes where the rollout does not begin by drafting."""
    return jax.lax.cond(drafting, start, lambda: zeros_like_result(start))


def zeros_like_result(function: Callable[[], T]) -> T:
    """Return zeros in the shapes of what `function` returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))
