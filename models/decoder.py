"""The policy network: one decoder for Qwen3, Qwen3-MoE, Qwen2.5, Llama 3.x and Mistral, selected by its config."""

from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Key

from models.config import DecoderConfig, ExpertsConfig, LayerConfig, Remat
from models.layers import Attention, Projection, RMSNorm, SwiGLU, init_cache, rotation_of
from models.moe import MoE
from models.rope import Rotation
from specjax import kernels
from specjax.cache import View, decode_view, token_at, tokens_at, uncached_view
from specjax.parallel.mesh import constrain, gather_weights
from specjax.shared_prompts import SharedPrompts
from specjax.types import Cache, LayerCache, Mixture, Policy, PolicyOutput, PyTree, Routing


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream. Returns (output, cache, routing of the experts).

    All T tokens are written to the cache. returned_at: int32 [B, N], the only tokens of each row to return: [B, N, D].
    experts: the mixture in place of the MLP. routes: int [B, T, A], experts to use in place of the router's choice.
    """

    config: LayerConfig
    experts: ExpertsConfig | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache | None,
        view: View,
        turn: Rotation,
        returned_at: Int[Array, "B N"] | None = None,
        routes: Integer[Array, "B T A"] | None = None,
    ) -> tuple[Float[Array, "B N D"], LayerCache | None, Routing | None]:
        c, decoding = self.config, cache is not None
        y, cache = Attention(c, name="attention")(RMSNorm(c, name="attention_norm")(x), cache, view, turn, returned_at)
        x = (x if returned_at is None else tokens_at(x, returned_at)) + y
        normed = RMSNorm(c, name="mlp_norm")(x)
        if self.experts is None:
            return x + SwiGLU(c, name="mlp")(normed), cache, None
        y, routing = MoE(c, self.experts, name="mlp")(normed, routes, decoding=decoding)
        return x + y, cache, routing


# What each layer saves for its backward pass, by `Remat`.
_SAVED = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, kernels.save_attention
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _uncached(
    block: Block, x: Float[Array, "B T D"], view: View, turn: Rotation, routes: Integer[Array, "B T A"] | None
) -> tuple[Float[Array, "B T D"], Routing | None]:
    x, _, routing = block(x, None, view, turn, routes=routes)
    return x, routing


class Decoder(nn.Module):
    """Decoder with the signature of `specjax.types.Policy.apply`.

    (tokens [B, T], start [B], cache, logits_at, visible_from, routes, shared) -> PolicyOutput.

    remat: what the backward pass recomputes. It does not affect a forward with a cache, which has no backward pass.
    """

    config: DecoderConfig
    remat: Remat = "none"

    def setup(self) -> None:
        c = self.config
        self.embed = nn.Embed(
            c.vocab_size,
            c.hidden_size,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.dtype(c.param_dtype),
            embedding_init=nn.with_logical_partitioning(
                nn.initializers.normal(c.hidden_size**-0.5), ("vocab", "embed")
            ),
        )
        self.layer = [Block(c, c.experts if i in c.expert_layers else None) for i in range(c.num_layers)]
        self.norm = RMSNorm(c)
        if not c.tie_embeddings:
            self.head = Projection(c, c.vocab_size, ("embed", "vocab"))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, "B"],
        cache: Cache | None = None,
        logits_at: Int[Array, "B"] | None = None,
        visible_from: Int[Array, "B"] | None = None,
        routes: Integer[Array, "B T M A"] | None = None,
        shared: SharedPrompts | None = None,
    ) -> PolicyOutput:
        x = constrain(jnp.take(self._table(), tokens, axis=0), "batch", None, None)
        windows, count = self.config.windows, tokens.shape[1]
        if cache is None:
            views = {window: uncached_view(start, count, window, shared) for window in windows}
        else:
            room = cache[0].k.shape[2]
            views = {window: decode_view(start, count, room, visible_from, window) for window in windows}
        turn = rotation_of(self.config, views[windows[0]].positions)
        features, layers, routings, expert_layers = [], [], [], self.config.expert_layers
        for i, block in enumerate(self.layer):
            if i in self.config.feature_layers:
                features.append(x)
            layer_routes = None if routes is None or i not in expert_layers else routes[:, :, expert_layers.index(i)]
            if cache is not None:
                x, layer, routing = block(x, cache[i], views[windows[i]], turn, routes=layer_routes)
                layers.append(layer)
            else:
                forward = _uncached if self.remat == "none" else nn.remat(_uncached, policy=_SAVED[self.remat])
                x, routing = forward(block, x, views[windows[i]], turn, layer_routes)
            if routing is not None:
                routings.append(routing)
        hidden = self.norm(x)
        return PolicyOutput(
            logits=self.unembed(hidden if logits_at is None else token_at(hidden, logits_at)),
            # Constrained here: otherwise the consumer's sharding spreads the whole residual stream over `tensor`.
            features=constrain(jnp.concatenate(features, axis=-1), "batch", None, None) if features else x[..., :0],
            hidden=hidden,
            cache=None if cache is None else tuple(layers),
            routing=jax.tree.map(lambda *x: jnp.stack(x, axis=2), *routings) if routings else None,
        )

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits of hidden states that have passed the final norm."""
        logits = kernels.matmul_transposed(hidden, self._table()) if self.config.tie_embeddings else self.head(hidden)
        # Losses add up over the vocabulary, or pick a part of it. `process_logits` gathers the few rows of a rollout.
        return constrain(logits, "batch", None, "vocab")

    def _table(self) -> Float[Array, "V D"]:
        """Return the embeddings in the compute dtype, gathered over `fsdp` so that a lookup is not replicated."""
        return gather_weights(self.embed.embedding.astype(self.config.dtype), "vocab", "embed")


def make_policy(config: DecoderConfig, remat: Remat = "none") -> Policy:
    """Return the decoder as the functions that the algorithms call. `remat` trades time for memory in training."""
    decoder, experts = Decoder(config, remat), config.experts
    return Policy(
        apply=lambda params, *args, **options: cast(PolicyOutput, decoder.apply({"params": params}, *args, **options)),
        init_cache=lambda rows, length: tuple(init_cache(config, rows, length) for _ in range(config.num_layers)),
        embedding=lambda params: params["embed"]["embedding"],
        unembed=lambda params, hidden: cast(Array, decoder.apply({"params": params}, hidden, method="unembed")),
        vocab_size=config.vocab_size,
        dtype=jnp.dtype(config.dtype),
        packs=True,
        mixture=experts and Mixture(len(config.expert_layers), experts.num_experts, experts.active),
    )


def init_decoder(config: DecoderConfig, key: Key[Array, ""]) -> PyTree:
    """Return random parameters, boxed with their logical axis names (`flax.linen.unbox` drops them)."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return Decoder(config).init(key, tokens, jnp.zeros(1, jnp.int32))["params"]
