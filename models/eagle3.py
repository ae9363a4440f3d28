"""The EAGLE-3 draft head (arXiv 2503.01840): fused features beside the next token's embedding, one decoder layer."""

from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from models.config import DecoderConfig, LayerConfig
from models.layers import Attention, RMSNorm, SwiGLU, init_cache, projection
from specjax.cache import View, decode_view, token_at
from specjax.drafters import DraftHead, HeadDrafter
from specjax.mesh import constrain
from specjax.types import Cache, LayerCache, Params, Policy, PyTree


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """The shape of a head. `hidden_size` must be the policy's, whose embedding the head borrows.

    feature_size:     width of the policy's concatenated features, 3 x its hidden size.
    draft_vocab_size: size of the head's own vocabulary, at most the policy's.
    """

    feature_size: int
    draft_vocab_size: int

    def check(self, policy: DecoderConfig) -> None:
        """Raises ValueError where the head does not fit the policy, naming the field."""
        if self.hidden_size != policy.hidden_size:
            raise ValueError(
                f"draft.hidden_size = {self.hidden_size}: must be the policy's hidden_size = {policy.hidden_size}"
            )
        expected = policy.hidden_size * len(policy.feature_layers)
        if self.feature_size != expected:
            raise ValueError(f"draft.feature_size = {self.feature_size}: the policy's features are {expected} wide")
        if not 0 < self.draft_vocab_size <= policy.vocab_size:
            raise ValueError(
                f"draft.draft_vocab_size = {self.draft_vocab_size}: must be within 1 .. {policy.vocab_size}"
            )


class Eagle3(nn.Module):
    """`fuse` features into hidden states; a call is one step of the head over [B, T] pairs (feature, next token)."""

    config: Eagle3Config

    def setup(self) -> None:
        c = self.config
        self.fc = projection(c, c.hidden_size, ("mlp", "embed"))
        self.input_norm = RMSNorm(c)
        self.hidden_norm = RMSNorm(c)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c)
        self.mlp = SwiGLU(c)
        self.norm = RMSNorm(c)
        self.head = projection(c, c.draft_vocab_size, ("embed", "vocab"))

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        """The three feature layers, low to high, projected to the head's width."""
        return self.fc(features)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embeddings: Float[Array, "B T D"],
        cache: Cache,
        view: View,
        only: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B N Vd"], Float[Array, "B N D"], Cache]:
        """Logits, the pre-norm state to feed back, and the cache. The embedding comes first in the concatenation.

        only: int32 [B], the one pair of each row to give them for, N = 1; the others only enter the cache.
        """
        x = jnp.concatenate([self.input_norm(embeddings), self.hidden_norm(hidden)], axis=-1)
        y, written = self.attention(x, cache[0], view, only)
        hidden = (hidden if only is None else token_at(hidden, only)) + y
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return constrain(self.head(self.norm(hidden)), "batch", None, None), hidden, (cast(LayerCache, written),)


def make_eagle3(
    config: Eagle3Config, policy: Policy, target_ids: np.ndarray | None = None, unroll: int = 3
) -> HeadDrafter:
    """The head as a drafter for `policy`; `target_ids` and `unroll` as `HeadDrafter` says."""
    module = Eagle3(config)

    def fuse(params: Params, features: Array) -> Array:
        return cast(Array, module.apply({"params": params.draft}, features, method="fuse"))

    def step(
        params: Params, hidden: Array, tokens: Array, cache: Cache, view: View, only: Array | None
    ) -> tuple[Array, Array, Cache]:
        embeddings = borrowed_embeddings(policy, params, tokens, hidden.dtype)
        return cast(tuple, module.apply({"params": params.draft}, hidden, embeddings, cache, view, only))

    head = DraftHead(
        reads=lambda output: output.features,
        fuse=fuse,
        step=step,
        init_cache=lambda rows, length: (init_cache(config, rows, length),),
    )
    return HeadDrafter(head, policy.vocab_size, target_ids, unroll)


def borrowed_embeddings(
    policy: Policy, params: Params, tokens: Int[Array, "B T"], dtype: jnp.dtype
) -> Float[Array, "B T D"]:
    """The policy's embeddings of these tokens, by reference and never trained here."""
    table = constrain(jax.lax.stop_gradient(policy.embedding(params.policy)).astype(dtype), "vocab", None)
    return constrain(jnp.take(table, tokens, axis=0), "batch", None, None)


def init_eagle3(config: Eagle3Config, key: Key[Array, ""]) -> PyTree:
    """Random parameters, boxed with their logical axis names."""

    def everything(module: Eagle3, features: Array, embeddings: Array) -> None:
        view = decode_view(jnp.zeros(1, jnp.int32), 1, 1)
        module(module.fuse(features), embeddings, (init_cache(config, 1, 1),), view)

    features = jnp.zeros((1, 1, config.feature_size), jnp.dtype(config.dtype))
    embeddings = jnp.zeros((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    return nn.init(everything, Eagle3(config))(key, features, embeddings)["params"]
