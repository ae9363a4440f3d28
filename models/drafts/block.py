"""Block drafts, which draft all tokens of a round in one forward: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147).

A decoder reads the pending token, the anchor, and masks after it. Its layers attend to keys and values of the policy's
features before the anchor, and within the block in both directions. DSpark adds a Markov head: the logits of a token
depend on the drafted token before it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from models.config import DecoderConfig
from models.drafts.shape import FeatureDraftConfig, sizes_of
from models.layers import Attention, Projection, RMSNorm, SwiGLU, init_cache, rotation_of
from specjax.cache import View
from specjax.drafters import BlockDrafter, BlockHead
from specjax.options import DraftLength, Layers, NonNegative
from specjax.parallel.mesh import constrain, gather_weights
from specjax.types import Cache, LayerCache, Params, Policy, PolicyOutput, PyTree


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FeatureDraftConfig):
    """Shape of a block draft. See also `FeatureDraftConfig`.

    With the whole vocabulary it borrows the policy's vocabulary head, with a part of it it has its own.

    Attributes:
        block_size: Most tokens that it drafts.
        num_layers: Number of layers.
        sample_from_anchor: The anchor's slot predicts the token after it, as DSpark's. False: it predicts nothing, and
            each other slot its own token, as DFlash's.
        mask_token_id: Row of the policy's embedding that stands for a token to draft; None: a row of the draft's own.
        sliding_layers: Layers with `sliding_window`, ascending; None: every layer.
        sliding_causal: Whether these layers attend causally within the block.
        markov_rank: Rank of the Markov head; 0: none.
        enable_confidence_head: It has a head that predicts the acceptance of each drafted token. It is trained, and
            never read in drafting.
        confidence_head_with_markov: This head also reads the Markov head's embedding of the token before.
    """

    block_size: DraftLength
    num_layers: Layers = 5
    sample_from_anchor: bool = True
    mask_token_id: NonNegative | None = None
    sliding_layers: tuple[NonNegative, ...] | None = None
    sliding_causal: bool = True
    markov_rank: NonNegative = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size == 0:
            raise ValueError("block_size = 0: must be at least 1")
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id = {self.mask_token_id}: must be below {self.vocab_size}, the rows of the embedding"
            )
        layers = self.sliding_layers or ()
        if list(layers) != sorted(set(layers)) or any(i >= self.num_layers for i in layers):
            raise ValueError(f"sliding_layers = {layers}: must be distinct, ascending and below {self.num_layers}")
        if self.sliding_window is None and self.sliding_layers is not None:
            raise ValueError(f"sliding_layers = {layers}: must be None without sliding_window")
        if self.confidence_head_with_markov and not (self.enable_confidence_head and self.markov_rank):
            raise ValueError(
                "confidence_head_with_markov = True: must be False without enable_confidence_head and markov_rank"
            )

    @property
    def kind(self) -> str:
        """Return `draft.kind`: dspark with a Markov or confidence head, dflash without both."""
        return "dspark" if self.markov_rank or self.enable_confidence_head else "dflash"

    @property
    def own_head(self) -> bool:
        """Return whether the draft has a vocabulary head of its own."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; None for a layer that attends to all positions."""
        sliding = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in sliding else None for i in range(self.num_layers))

    @property
    def most_drafted(self) -> int:
        return self.block_size


def block_like(policy: DecoderConfig, block_size: int, **changes: Any) -> BlockConfig:
    """Return a block draft with the policy's sizes and norms of queries and keys. changes: fields that differ."""
    return BlockConfig(**sizes_of(policy) | {"qk_norm": True, "block_size": block_size} | changes)


class BlockLayer(nn.Module):
    """Pre-norm attention and MLP over the slots. `write` caches the context, which no norm of the layer touches."""

    config: BlockConfig

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.attention = RMSNorm(c), Attention(c)
        self.mlp_norm, self.mlp = RMSNorm(c), SwiGLU(c)

    def __call__(self, x: Float[Array, "B T D"], cache: LayerCache, view: View, turn: Any) -> tuple[Array, LayerCache]:
        y, cache = cast(tuple, self.attention(self.attention_norm(x), cache, view, turn))
        x += y
        return x + self.mlp(self.mlp_norm(x)), cache


class BlockDraft(nn.Module):
    """A block draft. `write` caches the policy's features; a call drafts from anchors; `follow` is the Markov head."""

    config: BlockConfig

    def setup(self) -> None:
        c = self.config
        self.fc = Projection(c, c.hidden_size, ("features", "embed"))
        self.hidden_norm, self.norm = RMSNorm(c), RMSNorm(c)
        self.layer = [BlockLayer(c) for _ in range(c.num_layers)]
        if c.mask_token_id is None:
            self.mask = self._table("mask", (c.hidden_size,), ("embed",))
        if c.markov_rank:
            self.predecessor = self._table("predecessor", (c.vocab_size, c.markov_rank), ("vocab", "markov"))
            self.successor = Projection(c, c.draft_vocab_size, ("markov", "vocab"))
        if c.own_head:
            self.head = Projection(c, c.draft_vocab_size, ("embed", "vocab"))
        if c.enable_confidence_head:
            self.confidence = Projection(c, 1, (None, None), bias=True)

    def _table(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        init = nn.with_logical_partitioning(nn.initializers.normal(shape[-1] ** -0.5), axes)
        return cast(Array, self.param(name, init, shape, jnp.dtype(self.config.param_dtype)))

    def write(self, features: Float[Array, "B T F"], cache: Cache, start: Int[Array, "B"]) -> Cache:
        """Return the cache with keys and values of the features of positions start, .. in every layer."""
        context = self.hidden_norm(self.fc(features))
        turn = rotation_of(self.config, start[:, None] + jnp.arange(features.shape[1])[None])
        return tuple(
            layer.attention.write(context, each, start, turn) for layer, each in zip(self.layer, cache, strict=True)
        )

    def __call__(
        self,
        anchors: Float[Array, "B A D"],
        masks: Float[Array, "D"],
        place: Int[Array, "B A"],
        count: int,
        cache: Cache,
        visible_from: Int[Array, "B"],
        start: Int[Array, "B"],
    ) -> tuple[Float[Array, "B A K D"], Cache]:
        """Return the states that predict `count` tokens after each anchor, and the cache.

        anchors: embeddings of the anchors. masks: embedding of a token to draft.
        place:   positions of the anchors. Their context is visible_from .. place - 1, all below `start`.
        start:   index of the cache from which the slots are written. Slots of different anchors never see each other.
        """
        c = self.config
        slots = count + (not c.sample_from_anchor)
        rows, blocks = place.shape
        others = jnp.broadcast_to(masks, (rows, blocks, slots - 1, c.hidden_size)).astype(anchors.dtype)
        x = jnp.concatenate([anchors[:, :, None], others], axis=2).reshape(rows, blocks * slots, -1)
        views = {
            window: block_view(place, slots, cache[0].k.shape[2], visible_from, start, window, c.sliding_causal)
            for window in c.windows
        }
        turn = rotation_of(c, views[c.windows[0]].positions)
        x, layers = constrain(x, "batch", None, None), []
        for layer, each, window in zip(self.layer, cache, c.windows, strict=True):
            x, each = layer(x, each, views[window], turn)
            layers.append(each)
        states = self.norm(x).reshape(rows, blocks, slots, -1)
        return states[:, :, slots - count :], tuple(layers)

    def unembed(self, states: Float[Array, "B N D"]) -> Float[Array, "B N Vd"]:
        """Return the logits of the draft's own vocabulary head."""
        return constrain(self.head(states), "batch", None, "vocab")

    def follow(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch Vd"]:
        """Return what the Markov head adds to the logits after these tokens."""
        return self.successor(self._embedded(tokens))

    def confidence_of(self, states: Float[Array, "B N D"], tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
        """Return logits of the acceptance of the tokens drafted from these states, after these tokens."""
        if self.config.confidence_head_with_markov:
            states = jnp.concatenate([states, self._embedded(tokens)], axis=-1)
        return self.confidence(states)[..., 0]

    def _embedded(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch r"]:
        """Return the Markov head's embeddings of tokens."""
        table = gather_weights(self.predecessor.astype(self.config.dtype), "vocab", "markov")
        return jnp.take(table, tokens, axis=0)


def block_view(
    place: Int[Array, "B A"],
    slots: int,
    length: int,
    visible_from: Int[Array, "B"],
    start: Int[Array, "B"],
    window: int | None,
    causal: bool,
) -> View:
    """Return the view of the slots of each anchor on a cache of `length`. window, causal: of a sliding layer."""
    rows, blocks = place.shape
    slot, index = jnp.arange(slots)[None, None, :, None], jnp.arange(length)[None, None, None]
    position = place[:, :, None, None] + slot
    context = (index >= visible_from[:, None, None, None]) & (index < place[:, :, None, None])
    written = index - start[:, None, None, None]
    own = (written >= 0) & (written // slots == jnp.arange(blocks)[None, :, None, None])
    if window is not None:
        context &= index > position - window
        own &= written % slots > slot - window
        if causal:
            own &= written % slots <= slot
    mask = jnp.broadcast_to(context | own, (rows, blocks, slots, length)).reshape(rows, -1, length)
    return View(position.reshape(rows, -1), start, mask)


def make_block(config: BlockConfig, policy: Policy, target_ids: np.ndarray | None = None) -> BlockDrafter:
    """Return the block draft as a drafter for `policy`, whose embedding it reads. See `BlockDrafter` for `target_ids`.

    It also reads the policy's vocabulary head, unless it has its own.
    """
    module = BlockDraft(config)

    def apply(params: Params, *args: Any, **options: Any) -> Any:
        return module.apply({"params": params.draft}, *args, **options)

    def block(
        params: Params, tokens: Array, place: Array, count: int, cache: Cache, visible_from: Array, start: Array
    ) -> tuple[Array, Cache]:
        # The policy's embeddings by reference. Training the draft does not change them.
        table = jax.lax.stop_gradient(policy.embedding(params.policy)).astype(config.dtype)
        table = gather_weights(table, "vocab", "embed")
        anchors = constrain(jnp.take(table, tokens, axis=0), "batch", None, None)
        masks = params.draft["mask"] if config.mask_token_id is None else table[config.mask_token_id]
        return apply(params, anchors, masks.astype(config.dtype), place, count, cache, visible_from, start)

    def features(output: PolicyOutput) -> Array:
        return output.features

    def unembed(params: Params, states: Array) -> Array:
        if config.own_head:
            return apply(params, states, method="unembed")
        return policy.unembed(jax.lax.stop_gradient(params.policy), states)

    head = BlockHead(
        features=features,
        write=lambda params, features, cache, start: apply(params, features, cache, start, method="write"),
        block=block,
        unembed=unembed,
        follow=partial(apply, method="follow") if config.markov_rank else None,
        confidence=partial(apply, method="confidence_of") if config.enable_confidence_head else None,
        init_cache=lambda rows, length: tuple(init_cache(config, rows, length) for _ in range(config.num_layers)),
        size=config.block_size,
        slots=config.block_size + (not config.sample_from_anchor),
    )
    return BlockDrafter(head, policy.vocab_size, target_ids)


def init_block(config: BlockConfig, key: Key[Array, ""]) -> PyTree:
    """Return random parameters, boxed with their logical axis names."""

    def use_all_parameters(module: BlockDraft, features: Array, embedding: Array) -> None:
        at, cache = jnp.zeros(1, jnp.int32), tuple(init_cache(config, 1, 4) for _ in range(config.num_layers))
        cache = module.write(features, cache, at)
        module(embedding, embedding[0, 0], at[:, None] + 1, 1, cache, at, at + 1)
        if config.markov_rank:
            module.follow(at)
        if config.own_head:
            module.unembed(embedding)
        if config.enable_confidence_head:
            module.confidence_of(embedding, at[:, None])

    features = jnp.zeros((1, 1, config.feature_size), jnp.dtype(config.dtype))
    embedding = jnp.zeros((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    return nn.init(use_all_parameters, BlockDraft(config))(key, features, embedding)["params"]
