"""The `Drafter` protocol, which every drafter follows, and the types it uses."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling import SamplingLaw
from specjax.types import Cache, EightBit, Params, PolicyOutput, Prompts, PyTree, Rollout

DraftState = PyTree
# A Python bool, or a traced one if draft lengths are chosen automatically.
Flag = Bool[Array, ""] | bool
T = TypeVar("T")


class Proposal(NamedTuple):
    """Tokens proposed for one round.

    Attributes:
        tokens:    int32 [B, K].
        log_q:     float32 [B, K, V], log-probs that each token was sampled from, over the policy's vocabulary: minus
                   infinity where the drafter has no mass, one-hot (0 at the token) if it is deterministic.
        length:    int32 [B], 0 .. K, number of tokens that count. It may depend on the committed prefix, and a draft
                   may stop after a sampled token. It must never drop a token already looked at: that biases the law.
        predicted: bool [B], rows for whose first token `DraftLoss.overlap` predicts the acceptance: all but those
                   drafted from less context than the training forward sees. None: all rows.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K V"]
    length: Int[Array, "B"]
    predicted: Bool[Array, "B"] | None = None


class Anchors(NamedTuple):
    """Completion tokens of each row, each as position 1 of a draft that the loss counts.

    Attributes:
        place:  int32 [B, A], their indices in the row, ascending.
        weight: float32 [B, A], number of tokens of the row that each stands for; 0: it does not count.
    """

    place: Int[Array, "B A"]
    weight: Float[Array, "B A"]


class DraftLoss(NamedTuple):
    """Distillation loss of one microbatch.

    loss:    scalar, the sum over its tokens, to be divided by the global token count; differentiable only in the
             draft's parameters. With anchors, an unbiased estimate of that sum.
    overlap: float32 [B, T], sum_v min(p, q) of the policy's law and the draft's law for each token: the expected
             acceptance of position 1 of a draft there. 0 where the token does not count.
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
        """Return the memory after a rollout. Called in the fused program, with the rows of all shards."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens, observes the outcome of each verification, and can be distilled from the policy.

    A drafter is a set of functions over its own state, a pytree whose arrays have the row as leading axis. A drafter
    without parameters needs `start`, `propose` and `observe`; a subclass inherits defaults for the others.

    Attributes:
        proposes:          Whether it can propose tokens: all but `NoDrafter` can.
        reads_only_tokens: Whether a proposal depends only on the tokens before it, committed and drafted ones alike.
    """

    proposes: ClassVar[bool] = True
    reads_only_tokens: ClassVar[bool] = False

    @property
    def memory(self) -> Memory | None:
        """Return the drafter's memory of earlier rollouts; None for most drafters."""
        return None

    @property
    def stride(self) -> int:
        """Return how many completion tokens one anchor of distillation stands for. 1: the draft learns at each."""
        return 1

    @property
    def eight_bit(self) -> EightBit | None:
        """Return the format of the kernels in the rollout's copy of the parameters; None: the compute dtype."""
        return None

    def init_cache(self, rows: int, length: int, width: int) -> Cache:
        """Return an empty cache as `start`'s state has it, for rows with room for `length` positions; by default none.

        width: that of `start`. Memory is counted by it.
        """
        return ()

    def features(self, output: PolicyOutput) -> Float[Array, "B T F"]:
        """Return the features that the drafter reads from a forward of the policy; by default none, F = 0."""
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

        width:    K + 1, the most tokens that one verification emits. A cache in the state (LayerCache or TextCache of
                  specjax.types) must have room for the padded prompt and for what the drafter writes beyond committed
                  tokens. The rollout lengthens it by as many positions as the policy's cache.
        drafting: False if the rollout starts at draft length 0. `catch_up` is then called before any draft, so that
                  the work may be skipped (`start_if`).
        """
        ...

    def catch_up(
        self, state: DraftState, visible: Int[Array, "B"], tokens: Int[Array, "B S"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Return the state after rounds at draft length 0, which do not call the drafter.

        visible: number of positions of each row that the policy has cached.
        tokens:  the completion is the first `emitted` of them; the last of these is at position `visible`.

        Called before rounds that draft if draft lengths may be 0. If lengths are chosen automatically, a drafter
        without parameters is also called after the rollout, with prefixes of the completions
        (specjax.rollout.lookup_acceptance). A drafter that reads tokens adds the missed ones to its state. One that
        reads features restarts at `visible` in the rows that missed some. The default returns the state unchanged.
        """
        return state

    def propose(
        self, params: Params, state: DraftState, gumbel: Float[Array, "B K V"], law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        """Return K tokens for each row, sampled with the given noise from the drafter's own law, and the state."""
        ...

    def observe(
        self, state: DraftState, features: Float[Array, "B T F"], tokens: Int[Array, "B T"], emitted: Int[Array, "B"]
    ) -> DraftState:
        """Return the state after a verification that emitted the first `emitted` of `tokens`: d1 .. dm, y.

        features[b, i] belongs to the position before tokens[b, i]; T <= K + 1. `emitted` is m + 1, or 0 for a row
        that is finished or waits for its environment: it drafts from the same state again. The prefill counts as a
        verification of the prompt's last token, T = 1.
        """
        ...

    def append(
        self,
        params: Params,
        state: DraftState,
        features: Float[Array, "B O F"],
        tokens: Int[Array, "B O"],
        count: Int[Array, "B"],
        visible: Int[Array, "B"],
    ) -> DraftState:
        """Return the state after `count` tokens that nobody drew were appended to each row; unchanged where it is 0.

        features: features[b, i] belongs to the position before tokens[b, i], as in `observe`; O may be above K + 1.
        visible:  positions of each row that the policy had cached before.

        A state that lags behind rounds at draft length 0 stays as it is: `catch_up` comes before the next draft. The
        default, for a drafter that takes any number of tokens at a time, observes them.
        """
        return self.observe(state, features, tokens, count)

    def observe_finished(self, state: DraftState, prompts: Prompts, finished: Int[Array, "B G C"]) -> DraftState:
        """Return the state after other samples of the row's prompt have ended; by default unchanged.

        prompts:  the prompt of each row.
        finished: completion of each sample, encoded as in specjax.drafters.lookup; zeros for the row itself and for
                  samples that have not ended.

        Called if rows leave their slots before the rollout ends, and once at its start with nothing finished, so that
        the state can make room.
        """
        return state

    def loss(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        output: PolicyOutput,
        mask: Bool[Array, "B T"],
        law: SamplingLaw,
        anchors: Anchors | None = None,
    ) -> DraftLoss:
        """Return the distillation loss on a teacher-forced forward of the policy, without a gradient into the policy.

        output:  without logits; `specjax.log_probs.laws` computes laws where they are read.
        mask:    True at completion tokens. A prediction counts if the token it predicts does.
        anchors: the only tokens whose loss and overlap are read; None: all. A drafter may ignore it and compute all.

        The default, for a drafter without parameters, returns a loss and a predicted acceptance of 0.
        """
        return DraftLoss(jnp.float32(0), jnp.zeros(tokens.shape, jnp.float32))

    def overlaps(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        output: PolicyOutput,
        mask: Bool[Array, "B T"],
        law: SamplingLaw,
        positions: int,
    ) -> Float[Array, "N B T"]:
        """Return the expected acceptance of each token at position 1 .. N of a draft, given the tokens before it.

        N is `positions`, or 1 by default: `DraftLoss.overlap`. A drafter that reads only tokens drafts alike at every
        position.
        """
        overlap = self.loss(params, tokens, output, mask, law).overlap
        return jnp.broadcast_to(overlap[None], (positions if self.reads_only_tokens else 1, *overlap.shape))


def everywhere(tokens: Int[Array, "B T"]) -> Anchors:
    """Return as anchors all tokens of each row from the third on, which a draft on features can predict."""
    place = jnp.broadcast_to(jnp.arange(2, tokens.shape[1])[None], (len(tokens), tokens.shape[1] - 2))
    return Anchors(place, jnp.ones(place.shape, jnp.float32))


def at_anchors(anchors: Anchors, x: Float[Array, "B A"], length: int) -> Float[Array, "B T"]:
    """Return rows of `length` tokens with the values x at the anchors that count, 0 elsewhere. No gradient."""
    rows, counted = jnp.arange(len(x))[:, None], jax.lax.stop_gradient(jnp.where(anchors.weight > 0, x, 0.0))
    return jnp.zeros((len(x), length), jnp.float32).at[rows, anchors.place].add(counted)


def start_if(drafting: Flag, start: Callable[[], T]) -> T:
    """Return `start()`, or zeros of its shapes if `drafting` is False."""
    return jax.lax.cond(drafting, start, lambda: zeros_like_result(start))


def zeros_like_result(function: Callable[[], T]) -> T:
    """Return zeros in the shapes of what `function` returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))
