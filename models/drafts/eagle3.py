"""The EAGLE-3 draft head (arXiv 2503.01840): fused features beside the next token's embedding, one decoder layer.

Variants such as EAGLE-3.1 are options, named like the fields of the public checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from models.config import DecoderConfig
from models.decoder import Block
from models.drafts.shape import FeatureDraftConfig, sizes_of
from models.layers import Attention, Projection, RMSNorm, SwiGLU, init_cache, rotation_of
from specjax.cache import View, decode_view, tokens_at
from specjax.drafters import DraftHead, HeadDrafter
from specjax.options import Layers
from specjax.parallel.mesh import constrain, gather_weights
from specjax.types import Cache, Params, Policy, PolicyOutput, PyTree


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureDraftConfig):
    """Shape of a head, which has a vocabulary head of its own. See also `FeatureDraftConfig`.

    Attributes:
        num_layers: Number of layers. The first reads embedding and feature, later ones are plain decoder blocks.
        use_aux_hidden_state: Read feature layers, through `fc`; otherwise the policy's last hidden state, unprojected.
        norm_before_fc: Apply one norm to the concatenated features.
        fc_norm: Apply one norm to each feature layer.
        norm_before_residual: The residual of the first layer is the normed feature instead of the feature itself.
        norm_output: Feed back the state after the last norm instead of before it.
    """

    num_layers: Layers = 1
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc = True: must be False with fc_norm")
        for name in ("norm_before_fc", "fc_norm"):
            if getattr(self, name) and not self.use_aux_hidden_state:
                raise ValueError(f"{name} = True: must be False without use_aux_hidden_state")
        if self.fc_norm and self.feature_size % self.hidden_size:
            raise ValueError(
                f"feature_size = {self.feature_size}: must be a multiple of {self.hidden_size} with fc_norm"
            )

    @property
    def kind(self) -> str:
        return "eagle3"

    @property
    def reads_layers(self) -> bool:
        return self.use_aux_hidden_state

    @property
    def own_head(self) -> bool:
        """Return True: a head never reads the policy's vocabulary head."""
        return True


def eagle3_like(policy: DecoderConfig, draft_vocab_size: int | None = None, **changes: Any) -> Eagle3Config:
    """Return a head with the policy's sizes, without its norms and biases. changes: fields in which it differs.

    draft_vocab_size: None: the policy's.
    """
    sizes = sizes_of(policy, reads_layers=changes.get("use_aux_hidden_state", True))
    sizes |= {"qk_norm": False, "draft_vocab_size": draft_vocab_size or policy.vocab_size}
    return Eagle3Config(**sizes | changes)


class Eagle3(nn.Module):
    """EAGLE-3 head. `fuse` projects features; a call is one step over [B, T] pairs (hidden state, next token)."""

    config: Eagle3Config

    def setup(self) -> None:
        c = self.config
        if c.use_aux_hidden_state:
            self.fc = Projection(c, c.hidden_size, ("features", "embed"))
        if c.norm_before_fc:
            self.features_norm = RMSNorm(c)
        if c.fc_norm:
            self.feature_norm = [RMSNorm(c) for _ in range(c.feature_size // c.hidden_size)]
        self.input_norm = RMSNorm(c)
        self.hidden_norm = RMSNorm(c)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c)
        self.mlp = SwiGLU(c)
        self.layer = [Block(c) for _ in range(c.num_layers - 1)]
        self.norm = RMSNorm(c)
        self.head = Projection(c, c.draft_vocab_size, ("embed", "vocab"))

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        """Project the concatenated feature layers, low to high, to the head's width."""
        c = self.config
        if not c.use_aux_hidden_state:
            return features
        if c.norm_before_fc:
            features = self.features_norm(features)
        if c.fc_norm:
            parts = jnp.split(features, len(self.feature_norm), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.feature_norm, parts, strict=True)], -1)
        return self.fc(features)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embeddings: Float[Array, "B T D"],
        cache: Cache,
        view: View,
        returned_at: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N D"], Cache]:
        """Return the state for `unembed`, the state to feed back, and the cache. The embedding is concatenated first.

        returned_at: int32 [B, N], the only pairs of each row to return; None: all. The others only enter the cache.
        """
        c = self.config
        # Every layer but the last returns all tokens: the next layer needs their keys.
        indices = [None] * (c.num_layers - 1) + [returned_at]
        normed = self.hidden_norm(hidden)
        x = jnp.concatenate([self.input_norm(embeddings), normed], axis=-1)
        turn = rotation_of(c, view.positions)
        y, layer = self.attention(x, cache[0], view, turn, indices[0])
        residual = normed if c.norm_before_residual else hidden
        hidden = (residual if indices[0] is None else tokens_at(residual, indices[0])) + y
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        layers = [layer]
        for block, block_cache, index in zip(self.layer, cache[1:], indices[1:], strict=True):
            hidden, layer, _ = block(hidden, block_cache, view, turn, index)
            layers.append(layer)
        normed = self.norm(hidden)
        return normed, normed if c.norm_output else hidden, cast(Cache, tuple(layers))

    def unembed(self, normed: Float[Array, "B T D"]) -> Float[Array, "B T Vd"]:
        """Return the logits over the draft vocabulary."""
        return constrain(self.head(normed), "batch", None, "vocab")


def make_eagle3(
    config: Eagle3Config, policy: Policy, target_ids: np.ndarray | None = None, unroll: int = 3
) -> HeadDrafter:
    """Return the head as a drafter for `policy`. See `HeadDrafter` for `target_ids` and `unroll`."""
    module = Eagle3(config)

    def features(output: PolicyOutput) -> Array:
        if config.use_aux_hidden_state:
            return output.features
        return constrain(output.hidden, "batch", None, None)

    head = DraftHead(
        features=features,
        fuse=method_of(module, "fuse"),
        step=step_of(module, policy),
        unembed=method_of(module, "unembed"),
        init_cache=partial(init_caches, config),
        window=config.sliding_window,
    )
    return HeadDrafter(head, policy.vocab_size, target_ids, unroll)


def init_caches(config: Eagle3Config, rows: int, length: int) -> Cache:
    """Return an empty cache for each layer of the head."""
    return tuple(init_cache(config, rows, length) for _ in range(config.num_layers))


def method_of(module: nn.Module, name: str) -> Callable[[Params, Array], Array]:
    """Return a method of a head as a function (params, x), applied with the draft's parameters."""
    return lambda params, x: cast(Array, module.apply({"params": params.draft}, x, method=name))


def step_of(module: nn.Module, policy: Policy) -> Callable[..., tuple[Array, Array, Cache]]:
    """Return `DraftHead.step` for a network that takes token embeddings, looked up in the policy's table."""

    def step(
        params: Params, hidden: Array, tokens: Array, cache: Cache, view: View, returned_at: Array | None
    ) -> tuple[Array, Array, Cache]:
        # The policy's embeddings by reference. Training the draft does not change them.
        table = jax.lax.stop_gradient(policy.embedding(params.policy)).astype(hidden.dtype)
        table = gather_weights(table, "vocab", "embed")
        embeddings = constrain(jnp.take(table, tokens, axis=0), "batch", None, None)
        return cast(tuple, module.apply({"params": params.draft}, hidden, embeddings, cache, view, returned_at))

    return step


def init_eagle3(config: Eagle3Config, key: Key[Array, ""]) -> PyTree:
    """Return random parameters, boxed with their logical axis names."""

    def use_all_parameters(module: Eagle3, features: Array, embeddings: Array) -> None:
        view = decode_view(jnp.zeros(1, jnp.int32), 1, 1)
        module.unembed(module(module.fuse(features), embeddings, init_caches(config, 1, 1), view)[0])

    features = jnp.zeros((1, 1, config.feature_size), jnp.dtype(config.dtype))
    embeddings = jnp.zeros((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    return nn.init(use_all_parameters, Eagle3(config))(key, features, embeddings)["params"]
