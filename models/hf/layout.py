"""Tensors of a Hugging Face decoder checkpoint, and how their axes map to the axes of our parameters.

torch stores a linear layer as [out, in] with heads flattened. Ours are [in, .., out] with heads as an axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.config import DecoderConfig, ExpertsConfig, LayerConfig


@dataclass(frozen=True)
class Stored:
    """Stored tensor: the path of our parameter and, for each stored axis, the axes of ours that it flattens.

    place: place of the tensor along the first axis of a parameter that stacks several. Shapes, indices and `axes` then
    belong to one of them.
    """

    path: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    place: int | None = None

    def of(self, parameter: Any) -> Any:
        """Return what the tensor holds of a parameter, or of its shape or index: all, or without the first axis."""
        if self.place is None:
            return parameter
        return parameter[1:] if isinstance(parameter, tuple) else parameter[self.place]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the stored shape of a parameter of this shape."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def index(self, index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the stored tensor that holds the part `index` of a parameter of this shape.

        Among axes flattened together, only the first may be cut. Raises ValueError if another one is.
        """

        def cut(outer: int, *inner: int) -> slice:
            start, stop, _ = index[outer].indices(shape[outer])
            if any(index[axis].indices(shape[axis]) != (0, shape[axis], 1) for axis in inner):
                raise ValueError(f"{'.'.join(self.path)}: cannot be sharded over axes {inner}")
            width = math.prod(shape[axis] for axis in inner)
            return slice(start * width, stop * width)

        return tuple(cut(*group) for group in self.axes)

    def unpack(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return our parameter, or a part of it, with this shape."""
        order = [axis for group in self.axes for axis in group]
        return np.ascontiguousarray(stored.reshape([shape[axis] for axis in order]).transpose(np.argsort(order)))

    def pack(self, parameter: np.ndarray) -> np.ndarray:
        """Return the stored tensor for our parameter."""
        order = [axis for group in self.axes for axis in group]
        return np.ascontiguousarray(parameter.transpose(order).reshape(self.shape(parameter.shape)))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LINEAR = ((1,), (0,))
_TO_HEADS, _HEADS_BIAS, _FROM_HEADS = ((1, 2), (0,)), ((0, 1),), ((2,), (0, 1))


def norm(*path: str) -> Stored:
    """Return the entry for the scale of the norm at this path."""
    return Stored((*path, "scale"), ((0,),))


def linear(*path: str) -> Stored:
    """Return the entry for the two-axis kernel of the linear layer at this path."""
    return Stored((*path, "kernel"), _LINEAR)


def stored_tensors(config: DecoderConfig) -> dict[str, Stored]:
    """Return the tensors of a policy's checkpoint by name, layer by layer."""
    tensors = {EMBEDDING: Stored(("embed", "embedding"), ((0,), (1,)))}
    for i in range(config.num_layers):
        experts = config.experts if i in config.expert_layers else None
        tensors |= block_tensors(config, f"model.layers.{i}.", f"layer_{i}", experts)
    tensors["model.norm.weight"] = norm("norm")
    if not config.tie_embeddings:
        tensors[HEAD] = linear("head")
    return tensors


def block_tensors(
    config: LayerConfig, prefix: str, path: str, experts: ExpertsConfig | None = None
) -> dict[str, Stored]:
    """Return the tensors of one decoder block. Names begin with `prefix`, paths of parameters with `path`."""
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
        if experts is None:
            block[f"mlp.{name}_proj.weight"] = linear("mlp", name)
            continue
        for i in range(experts.num_experts):
            block[f"mlp.experts.{i}.{name}_proj.weight"] = Stored(("mlp", "experts", name), _LINEAR, place=i)
    if experts is not None:
        block["mlp.gate.weight"] = Stored(("mlp", "router"), _LINEAR)
    return {prefix + name: replace(stored, path=(path, *stored.path)) for name, stored in sorted(block.items())}
