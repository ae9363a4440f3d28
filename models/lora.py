"""LoRA (arXiv 2106.09685): which dense layers of a decoder have adapters, of what size, and how these begin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from models.params import Init
from specjax.adapters import KERNEL, SCALE, A, B
from specjax.options import NonNegative, Options, Positive, above, at_most
from specjax.parallel import processes
from specjax.param_labels import contracted_axes
from specjax.types import EightBit, PyTree

Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = get_args(Matrix)
MOST_ALPHA = 1e6


@dataclass(frozen=True)
class LoraConfig(Options):
    """Low-rank adapters (LoRA). Only they are trained; the policy's own weights are frozen, in model.dtype.

    Embeddings, the vocabulary head and experts of a mixture have none. The draft is trained whole.

    Attributes:
        rank:         Rank r of the adapters; 0: none, all weights are trained.
        alpha:        The adapters' product is scaled by alpha / r. None: r.
        rslora:       Scale by alpha / sqrt(r) (arXiv 2312.03732) instead.
        targets:      Matrices with adapters. None: all that the policy has of q, k, v, o, gate, up and down.
        rank_pattern: Ranks other than `rank`: pairs of a rank and the end of a path such as layer_3.attention.q.
        path:         PEFT directory or name on the hub to start from. It sets the fields above, which keep their
                      defaults.
        base_dtype:   int8 or fp8: the frozen kernels have 8 bits, in rollouts and training alike. None: model.dtype.
        merged:       Rollouts read weights with the adapters added and rounded, another law than the one that is
                      trained; loss.importance_cap corrects for it.
    """

    rank: NonNegative = 0
    alpha: Annotated[float, above(0), at_most(MOST_ALPHA)] | None = None
    rslora: bool = False
    targets: tuple[Matrix, ...] | None = None
    rank_pattern: tuple[tuple[Positive, str], ...] = ()
    path: str | None = None
    base_dtype: EightBit | None = None
    merged: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value == field.default:
                continue
            if not self.enabled:
                raise ValueError(f"{name} = {value}: must be {field.default} without lora.rank or lora.path")
            if self.path is not None and name in ("rank", "alpha", "rslora", "targets", "rank_pattern"):
                raise ValueError(f"{name} = {value}: must be {field.default} with lora.path, whose files say it")
        if self.targets == ():
            raise ValueError(
                f"targets = (): must name some of {', '.join(MATRICES)}; without adapters set lora.rank = 0"
            )
        if self.merged and self.base_dtype is not None:
            raise ValueError(f"merged = True: must be False with lora.base_dtype = {self.base_dtype}")

    @property
    def enabled(self) -> bool:
        """Return whether the policy has adapters."""
        return self.rank > 0 or self.path is not None

    @property
    def named(self) -> str:
        """Return the option that turns adapters on, for messages."""
        return f"lora.rank = {self.rank}" if self.path is None else f"lora.path = {self.path}"


class Adapted(NamedTuple):
    """Dense layer with an adapter.

    path:     names of the layer in the policy's parameters.
    into:     sizes of the input axes of its kernel. features: of its output axes.
    axes:     logical names of the kernel's axes.
    rank:     r.
    alpha, rslora: as in LoraConfig, for the factor of the adapter's product.
    """

    path: tuple[str, ...]
    into: tuple[int, ...]
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Return s, the factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapted_layers(init: Init, config: LoraConfig) -> list[Adapted]:
    """Return the layers with adapters of the network that `init` makes, in the order of its parameters.

    Raises ValueError for targets and patterns that no layer matches, and for ranks that no kernel has.
    """
    boxed = jax.eval_shape(init, jax.random.key(0))
    contracted = flax.traverse_util.flatten_dict(contracted_axes(nn.unbox(boxed)))
    kernels = {
        path[:-1]: box
        for path, box in flax.traverse_util.flatten_dict(boxed).items()
        if path[-2:-1] and contracted[path]
    }
    layers: dict[tuple[str, ...], Any] = {
        path: box for path, box in kernels.items() if path[-1] in (config.targets or MATRICES)
    }
    found = [name for name in MATRICES if any(path[-1] == name for path in kernels)]
    for name in config.targets or ():
        if name not in found:
            raise ValueError(
                f"lora.targets = {' '.join(config.targets or ())}: {name}: the policy has no such dense layer; must be "
                f"of {', '.join(found)} (experts of a mixture have no adapters)"
            )
    for rank, end in config.rank_pattern:
        if not any(_matches(path, end) for path in layers):
            raise ValueError(f"lora.rank_pattern = {rank} {end}: no layer with an adapter has a path that ends so")
    _check_ranks(config, {path: _most_rank(box.value.shape, contracted[*path, KERNEL]) for path, box in layers.items()})
    adapted = []
    for path, box in layers.items():
        split = contracted[*path, KERNEL]
        rank = next((rank for rank, end in config.rank_pattern if _matches(path, end)), config.rank)
        alpha = float(rank) if config.alpha is None else config.alpha
        shape = box.value.shape
        adapted.append(Adapted(path, shape[:split], shape[split:], box.names, rank, alpha, config.rslora))
    return adapted


def init_adapters(layers: Sequence[Adapted], key: Key[Array, ""]) -> PyTree:
    """Return adapters, boxed with their logical axis names: A uniform within 1 / sqrt(inputs), as in PEFT, B zero."""
    flat = dict[tuple[str, ...], Any]()
    for i, layer in enumerate(layers):
        bound, split = 1 / math.sqrt(math.prod(layer.into)), len(layer.into)
        shape = (*layer.into, layer.rank)
        a = jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -bound, bound)
        flat[*layer.path, A] = nn.LogicallyPartitioned(a, (*layer.axes[:split], None))
        b = jnp.zeros((layer.rank, *layer.features), jnp.float32)
        flat[*layer.path, B] = nn.LogicallyPartitioned(b, (None, *layer.axes[split:]))
    return flax.traverse_util.unflatten_dict(flat)


def with_scales(base: PyTree, layers: Sequence[Adapted], mesh: Mesh, *, shapes: bool = False) -> PyTree:
    """Return the base with the scale of each adapter beside its kernel. shapes: as ShapeDtypeStructs, like the base."""
    flat: dict[tuple[str, ...], Any] = flax.traverse_util.flatten_dict(base)
    everywhere = NamedSharding(mesh, P())
    for layer in layers:
        scale = np.float32(layer.scale)
        flat[*layer.path, SCALE] = (
            jax.ShapeDtypeStruct((), scale.dtype, sharding=everywhere) if shapes else processes.place(scale, everywhere)
        )
    return flax.traverse_util.unflatten_dict(flat)


def _most_rank(shape: tuple[int, ...], split: Any) -> int:
    """Return the highest rank of a kernel, whose first `split` axes are its input's."""
    return min(math.prod(shape[:split]), math.prod(shape[split:]))


def _check_ranks(config: LoraConfig, most: Mapping[tuple[str, ...], int]) -> None:
    """Raise ValueError for a rank above that of every kernel it is for: an update has no higher one."""
    given = [("rank", config.rank, str(config.rank), "")]
    given += [("rank_pattern", rank, f"{rank} {end}", end) for rank, end in config.rank_pattern]
    for name, rank, value, end in given:
        limit = max((limit for path, limit in most.items() if not end or _matches(path, end)), default=rank)
        if rank > limit:
            raise ValueError(f"lora.{name} = {value}: must be at most {limit}, the highest rank of its layers")


def _matches(path: tuple[str, ...], end: str) -> bool:
    return f".{'.'.join(path)}".endswith(f".{end}")
