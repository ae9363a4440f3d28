"""The tensors of a Hugging Face decoder checkpoint, and how each one's axes relate to our parameter's.

torch keeps a linear layer as [out, in] with the heads flattened; here it is [in, ..., out] with the heads apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.config import DecoderConfig, LayerConfig


@dataclass(frozen=True)
class Stored:
    """One stored tensor: the path of our parameter, and for each stored axis those of ours that it flattens."""

    path: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of a parameter of this shape."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def index(self, index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
        """The part of the stored tensor that holds the part `index` of the parameter.

        Of axes flattened together only the first may be cut.
        """

        def cut(first: int, *inner: int) -> slice:
            start, stop, _ = index[first].indices(shape[first])
            if any(index[axis].indices(shape[axis]) != (0, shape[axis], 1) for axis in inner):
                raise ValueError(f"{'.'.join(self.path)}: cannot be sharded over axes {inner}")
            width = math.prod(shape[axis] for axis in inner)
            return slice(start * width, stop * width)

        return tuple(cut(*group) for group in self.axes)

    def unpack(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Our parameter, or a part of it, of this shape."""
        order = [axis for group in self.axes for axis in group]
        return np.ascontiguousarray(stored.reshape([shape[axis] for axis in order]).transpose(np.argsort(order)))

    def pack(self, parameter: np.ndarray) -> np.ndarray:
        """The stored tensor."""
        order = [axis for group in self.axes for axis in group]
        return np.ascontiguousarray(parameter.transpose(order).reshape(self.shape(parameter.shape)))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TO_HEADS, _HEADS_BIAS, _FROM_HEADS = ((1, 2), (0,)), ((0, 1),), ((2,), (0, 1))


def norm(*path: str) -> Stored:
    """The scale of the norm at this path."""
    return Stored((*path, "scale"), ((0,),))


def linear(*path: str) -> Stored:
    """The kernel of the linear layer at this path, of two axes."""
    return Stored((*path, "kernel"), ((1,), (0,)))


def stored_tensors(config: DecoderConfig) -> dict[str, Stored]:
    """The tensors of the checkpoint by name, layer by layer."""
    tensors = {EMBEDDING: Stored(("embed", "embedding"), ((0,), (1,)))}
    for i in range(config.num_layers):
        tensors |= block_tensors(config, f"model.layers.{i}.", f"layer_{i}")
    tensors["model.norm.weight"] = norm("norm")
    if not config.tie_embeddings:
        tensors[HEAD] = linear("head")
    return tensors


def block_tensors(config: LayerConfig, prefix: str, path: str) -> dict[str, Stored]:
    """The tensors of one decoder block, whose names begin with `prefix`; its parameters stand under `path`."""
    block = {
        "self_attn.o_proj.weight": Stored(("attention", "o", "kernel"), _FROM_HEADS),
        "input_layernorm.weight": norm("attention_norm"),
        "post_attention_layernorm.weight": norm("mlp_norm"),
    }
    for name in ("q", "k", "v"):
        block[f"self_attn.{name}_proj.weight"] = Stored(("attention", name, "kernel"), _TO_HEADS)
        if config.qkv_bias:
            block[f"self_attn.{name}_proj.bias"] = Stored(("attention", name, "bias"), _HEADS_BIAS)
    for name in ("q", "k") if config.qk_norm else ():
        block[f"self_attn.{name}_norm.weight"] = norm("attention", f"{name}_norm")
    for name in ("gate", "up", "down"):
        block[f"mlp.{name}_proj.weight"] = linear("mlp", name)
    return {prefix + name: Stored((path, *stored.path), stored.axes) for name, stored in sorted(block.items())}
