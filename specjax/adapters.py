"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + s (x A) B, with A and B trained and W frozen.

A policy with adapters has its parameters in two trees of the same names: what is trained is in `Params.policy`, the
rest in `Params.base`. Beside `kernel` [*in, *features] there are

    in `policy`: `lora_a` [*in, r] and `lora_b` [r, *features], float32
    in `base`:   `lora_scale`, the scalar s, float32

A forward takes the base, with or without adapters: by itself it is the policy before training.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.types import Params, PyTree

KERNEL, A, B, SCALE = "kernel", "lora_a", "lora_b", "lora_scale"


def joined(params: Params) -> Params:
    """Return the parameters with the policy's in one tree, as its forward takes them; unchanged without a base.

    The leaves may be anything, such as shapes or shardings.
    """
    if not params.base:
        return params
    return replace(params, policy=_combined(params.base, params.policy, lambda base, adapter: adapter), base=())


def merged(params: Params) -> Params:
    """Return the parameters with W + s A B as the policy's kernels: one tree, with the structure of the base.

    They are added in float32 and rounded once to the dtype of W, which loses what is below its spacing.
    """

    def merge(base: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
        kernel, product = base[KERNEL], delta(adapter[A], adapter[B], base[SCALE])
        return {KERNEL: (kernel.astype(jnp.float32) + product).astype(kernel.dtype)}

    return replace(params, policy=_combined(params.base, params.policy, merge), base=()) if params.base else params


def adapters_off(params: Params) -> Params:
    """Return the parameters of the policy before training."""
    return replace(params, policy=params.base, base=())


def delta(a: Float[Array, "*in_r"], b: Float[Array, "r *features"], scale: Float[Array, ""]) -> Float[Array, "..."]:
    """Return s A B in the shape of the kernel, in float32."""
    # By default GPUs multiply float32 in TF32.
    return jnp.tensordot(a, b * scale, axes=1, precision="highest")


def _combined(base: PyTree, adapters: PyTree, of_kernel: Callable[[Any, Any], dict[str, Any]]) -> PyTree:
    """Return the base, updated beside each adapted kernel by what `of_kernel` returns for its two dicts."""
    if A in adapters:
        return base | of_kernel(base, adapters)
    return base | {name: _combined(base[name], inner, of_kernel) for name, inner in adapters.items()}
