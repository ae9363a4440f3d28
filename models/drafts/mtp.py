"""Native multi-token-prediction heads: one decoder block after the policy's last hidden state (DeepSeek-V3, section
2.2 of arXiv 2412.19437; Qwen3-Next and Qwen3.5; MiMo, arXiv 2505.07608).

The published families share one network and differ in a few conventions. A head of one layer drafts K tokens by feeding
its state back K - 1 times.
"""

from dataclasses import dataclass
from typing import Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from models.config import DecoderConfig, LayerConfig
from models.decoder import Block
from models.drafts.eagle3 import method_of, step_of
from models.layers import Projection, RMSNorm, init_cache, rotation_of
from specjax.cache import View, decode_view
from specjax.drafters import DraftHead, HeadDrafter
from specjax.options import Positive
from specjax.parallel.mesh import constrain
from specjax.types import Cache, LayerCache, Params, Policy, PolicyOutput, PyTree

ConventionName = Literal["qwen3_next", "deepseek_v3", "mimo"]


@dataclass(frozen=True)
class Convention:
    """Choices in which the MTP heads of one family differ from another's.

    Attributes:
        name: Name of the convention, also in checkpoints.
        embedding_first: The embedding precedes the hidden state in the concatenation.
        feeds_back: State that the next step reads: the residual stream after the block, before or after the final norm.
        zeroes_first: The embedding paired with position 0 is zero.
        own_head: The MTP head has a vocabulary head of its own; otherwise it borrows the policy's.
    """

    name: ConventionName
    embedding_first: bool
    feeds_back: Literal["residual", "normed"]
    zeroes_first: bool
    own_head: bool


CONVENTIONS: dict[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention("qwen3_next", embedding_first=True, feeds_back="normed", zeroes_first=False, own_head=False),
        Convention("deepseek_v3", embedding_first=True, feeds_back="residual", zeroes_first=True, own_head=True),
        Convention("mimo", embedding_first=False, feeds_back="normed", zeroes_first=True, own_head=False),
    )
}


@dataclass(frozen=True, kw_only=True)
class MTPConfig(LayerConfig):
    """Head over one decoder block of the policy's shape. `vocab_size` is the size of a vocabulary head of its own."""

    convention: Convention
    vocab_size: Positive


def mtp_config(policy: DecoderConfig, convention: str) -> MTPConfig:
    """Return the config of a policy's MTP head under the convention of this name.

    The head attends to all positions, even if layers of the policy have sliding windows.
    """
    return MTPConfig(**policy.layer_options(), convention=CONVENTIONS[convention], vocab_size=policy.vocab_size)


class MTP(nn.Module):
    """One step of the head over [B, T] pairs (hidden state, next token)."""

    config: MTPConfig

    def setup(self) -> None:
        c = self.config
        self.embedding_norm = RMSNorm(c)
        self.hidden_norm = RMSNorm(c)
        self.fc = Projection(c, c.hidden_size, ("features", "embed"))
        self.block = Block(c)
        self.norm = RMSNorm(c)
        if c.convention.own_head:
            self.head = Projection(c, c.vocab_size, ("embed", "vocab"))

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        embeddings: Float[Array, "B T D"],
        cache: Cache,
        view: View,
        returned_at: Int[Array, "B N"] | None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N D"], Cache]:
        """Return the state for the vocabulary head, the state to feed back, and the cache.

        returned_at: int32 [B, N], the only pairs of each row to return; None: all. The others only enter the cache.
        """
        convention = self.config.convention
        if convention.zeroes_first:
            embeddings = embeddings * (view.positions > 0).astype(embeddings.dtype)[..., None]
        pair = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if not convention.embedding_first:
            pair.reverse()
        x = self.fc(jnp.concatenate(pair, axis=-1))
        turn = rotation_of(self.config, view.positions)
        x, layer, _ = self.block(constrain(x, "batch", None, None), cache[0], view, turn, returned_at)
        normed = self.norm(x)
        return normed, normed if convention.feeds_back == "normed" else x, (cast(LayerCache, layer),)

    def unembed(self, normed: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits of the head's own vocabulary head. Needs a convention with `own_head`."""
        return constrain(self.head(normed), "batch", None, "vocab")


def make_mtp(config: MTPConfig, policy: Policy, unroll: int = 3) -> HeadDrafter:
    """Return the head as a drafter for `policy`. It reads the policy's hidden state after the final norm.

    See `HeadDrafter` for `unroll`.
    """
    module = MTP(config)

    def borrowed_head(params: Params, normed: Array) -> Array:
        return policy.unembed(jax.lax.stop_gradient(params.policy), normed)

    logits = method_of(module, "unembed") if config.convention.own_head else borrowed_head

    head = DraftHead(
        features=_hidden,
        fuse=lambda params, features: features,
        step=step_of(module, policy),
        unembed=logits,
        init_cache=lambda rows, length: (init_cache(config, rows, length),),
    )
    return HeadDrafter(head, policy.vocab_size, unroll=unroll)


def _hidden(output: PolicyOutput) -> Array:
    return constrain(output.hidden, "batch", None, None)


def init_mtp(config: MTPConfig, key: Key[Array, ""]) -> PyTree:
    """Return random parameters, boxed with their logical axis names."""

    def use_all_parameters(module: MTP, x: Array) -> None:
        view = decode_view(jnp.zeros(1, jnp.int32), 1, 1)
        normed, _, _ = module(x, x, (init_cache(config, 1, 1),), view, None)
        if config.convention.own_head:
            module.unembed(normed)

    x = jnp.zeros((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    return nn.init(use_all_parameters, MTP(config))(key, x)["params"]
