"""Earlier rollouts on which a draft is trained again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.train.batch import Sequences
from specjax.types import Rollout, TrainState, pytree


@pytree
class Replay:
    """The last n rollouts; each overwrites the one n steps before it.

    tokens: int32 [n, R, S], as in `Sequences`. start, end: int32 [n, R], where the completion begins, and ends.
    sampled: bool [n, R, S], completion tokens of rollouts with turns; None: all between `start` and `end`.
    """

    tokens: Int[Array, "n R S"]
    start: Int[Array, "n R"]
    end: Int[Array, "n R"]
    sampled: Bool[Array, "n R S"] | None = None

    @classmethod
    def empty(cls, count: int, rows: tuple[int, int], turns: bool = False) -> "Replay":
        """Return room for `count` rollouts of shape (R, S). turns: they have observed tokens."""
        # Separate arrays: a state is donated, and no buffer can be donated twice.
        shapes = (count, *rows), (count, rows[0]), (count, rows[0])
        sampled = jnp.zeros((count, *rows), bool) if turns else None
        return cls(*(jnp.zeros(shape, jnp.int32) for shape in shapes), sampled=sampled)

    def rows(self) -> Sequences:
        """Return the rollouts as rows [n, R, ..]."""
        if self.sampled is not None:
            return Sequences(self.tokens, self.sampled)
        column = jnp.arange(self.tokens.shape[-1])[None, None]
        return Sequences(self.tokens, (column >= self.start[..., None]) & (column < self.end[..., None]))

    def add(self, sequences: Sequences, step: Int[Array, ""]) -> "Replay":
        """Overwrite the oldest rollout."""
        end = sequences.lengths
        sampled = None if self.sampled is None else sequences.completion
        start = end - jnp.sum(sequences.completion, axis=1, dtype=jnp.int32)
        new = Replay(sequences.tokens, start, end, sampled)
        at = step % len(self.tokens)
        return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, at, 0), self, new)


def replay_rows(state: TrainState) -> Sequences | None:
    """Return the rows of earlier rollouts to train on, [n, R, ..], or None."""
    replay: Replay | None = None if state.adaptation is None else state.adaptation.replay
    return None if replay is None else replay.rows()


def check_replay(state: TrainState, rollout: Rollout) -> None:
    """Raise ValueError if rollouts that are replayed have observed tokens, and the state was not made for them."""
    replay = None if state.adaptation is None else state.adaptation.replay
    if replay is not None and replay.sampled is None and rollout.sampled is not None:
        raise ValueError("draft_training.replay: must be 0 for a rollout function with `sampled` and no environment")
