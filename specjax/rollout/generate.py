"""Rollout functions run over the mesh: each data shard generates by itself, with parameters gathered once."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from specjax.adapters import adapters_off, joined, merged
from specjax.drafters import Drafter
from specjax.keys import SeedStep
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.quantization import QuantizedKernel, kernel_layout, map_kernels, rollout_copy
from specjax.rollout.plan import RolloutConfig, choose_lengths
from specjax.types import EightBit, Params, Policy, Prompts, PyTree, Rollout

RolloutFn = Callable[[Policy, Drafter, Params, Prompts, SeedStep, RolloutConfig], Rollout]
Choice = Int[Array, "phases"] | None
Generate = Callable[[Params, Prompts, SeedStep, Choice], Rollout]
T = TypeVar("T")


def prepare(policy: Policy, drafter: Drafter, params: Params) -> Params:
    """Cast the parameters to the policy's compute dtype, and the kernels of each network with `eight_bit` to 8 bits.

    Adapters join the base, or are merged into it. This is one half of what arXiv 2604.26779 calls "prepare";
    `per_shard` does the other, the gather.
    """
    return joined(cast_params(policy, drafter, params))


@jax.named_scope("prepare")
def cast_params(policy: Policy, drafter: Drafter, params: Params) -> Params:
    """Return what `prepare` joins: adapters and their base apart, unless they are merged, so that each may be sent."""
    params = merged(params) if policy.merged else params
    return Params(
        rollout_copy(params.policy, policy.dtype, policy.eight_bit),
        rollout_copy(params.draft, policy.dtype, drafter.eight_bit),
        params.memory,
        rollout_copy(params.base, policy.dtype, policy.eight_bit),
    )


def make_prepare(policy: Policy, drafter: Drafter, params: Params) -> Callable[[Params], Params]:
    """Return `prepare` with the gather as a separate program, for parameters sharded as `params`.

    Call it with their mesh set. Rollouts with the parameters that it returns need no further gather. A frozen base in
    the dtype and layout of rollouts is not copied.
    """
    layout = cast_shardings(policy, drafter, params)
    shares_base = _may_share_base(policy, params.base, layout.base)
    program = jax.jit(
        partial(cast_params, policy, drafter), out_shardings=replace(layout, base=()) if shares_base else layout
    )

    def run(params: Params) -> Params:
        if not shares_base:
            return joined(program(params))
        return joined(replace(program(replace(params, base=())), base=params.base))

    return run


def _may_share_base(policy: Policy, base: PyTree, layout: PyTree) -> bool:
    """Return whether the frozen base needs no copy for rollouts: it has their dtype, or 8 bits, and their layout."""
    if not base or policy.merged or policy.eight_bit is not None:
        return False

    def fits(x: Array | QuantizedKernel, gathered: Any) -> bool:
        if isinstance(x, QuantizedKernel):
            return x.values.sharding.is_equivalent_to(gathered.values, x.ndim)
        # Scalars, the scales of adapters, are never cast.
        return x.ndim == 0 or (x.dtype == policy.dtype and x.sharding.is_equivalent_to(gathered, x.ndim))

    return jax.tree.all(jax.tree.map(fits, base, layout, is_leaf=lambda x: isinstance(x, QuantizedKernel)))


def cast_shardings(policy: Policy, drafter: Drafter, params: Params) -> Params:
    """Return the shardings of the parameters of `cast_params`, gathered over data and fsdp; None without a mesh."""
    params = adapters_off(params) if policy.merged and params.base else params

    def gathered(x: Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
        if not isinstance(x.sharding, NamedSharding):
            return None
        kept = (None if _overlaps(axes) else axes for axes in x.sharding.spec)
        return NamedSharding(x.sharding.mesh, P(*kept))

    def network(params: PyTree, eight_bit: EightBit | None) -> PyTree:
        def kernel(
            x: Array | jax.ShapeDtypeStruct | QuantizedKernel, contract: int
        ) -> NamedSharding | QuantizedKernel | None:
            if isinstance(x, QuantizedKernel):
                return kernel_layout(gathered(x.values), contract)
            return gathered(x) if eight_bit is None else kernel_layout(gathered(x), contract)

        return map_kernels(kernel, gathered, params)

    policy_copy, base_copy = (network(x, policy.eight_bit) for x in (params.policy, params.base))
    draft_copy = network(params.draft, drafter.eight_bit)
    return Params(policy_copy, draft_copy, jax.tree.map(gathered, params.memory), base_copy)


def copy_on(mesh: Mesh, policy: Policy, drafter: Drafter, params: Params) -> Params:
    """Return what `cast_params` returns as ShapeDtypeStructs on a mesh, gathered over data and fsdp.

    Each is divided as on its own mesh, but over no axis of the given mesh that does not divide it.
    """

    def fit(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        names = (axes if isinstance(axes, tuple) or axes is None else (axes,) for axes in sharding.spec)
        divided = (
            axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None
            for axes, size in zip(names, x.shape, strict=False)
        )
        return x.update(sharding=NamedSharding(mesh, P(*divided)))

    shapes = jax.eval_shape(partial(cast_params, policy, drafter), params)
    return jax.tree.map(fit, shapes, cast_shardings(policy, drafter, params))


def per_shard(rollout_fn: RolloutFn, policy: Policy, drafter: Drafter, config: RolloutConfig, mesh: Mesh) -> Generate:
    """Return a function that runs `rollout_fn` on each data shard, with the shard's prompts and its own loop.

    Parameters enter gathered over data and fsdp; over tensor, the compiler partitions them. The last argument of the
    function is None, or `chosen` of `ChosenConfig`.
    """

    def generate(params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice) -> Rollout:
        return rollout_fn(policy, drafter, params, prompts, seed_step, choose_lengths(config, chosen))

    return on_shards(generate, mesh, (P(), P(BATCH_AXES), P(), P()))


def on_shards(function: Callable[..., T], mesh: Mesh, inputs: tuple[P, ...]) -> Callable[..., T]:
    """Return a function that runs on each data shard by itself, and whose results have rows.

    inputs: how each argument is divided over the data shards.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=inputs,
        out_specs=P(BATCH_AXES),
        axis_names=set(BATCH_AXES),
        # Loop carries start replicated and become shard-dependent. The check would need an annotation on each of them.
        check_vma=False,
    )


def place(prompts: Prompts, mesh: Mesh) -> Prompts:
    """Put the prompts on the mesh, split over the data shards. Raises ValueError if they do not divide evenly."""
    return processes.place(prompts, abstract_prompts(prompts, mesh).tokens.sharding)


def abstract_prompts(prompts: Prompts, mesh: Mesh) -> Prompts:
    """Return what `place` would return, as ShapeDtypeStructs; the prompts may be such too."""
    shards = batch_shards(mesh)
    count = len(prompts.lengths)
    if count % shards:
        raise ValueError(f"prompts = {count}: must be a multiple of the mesh's data x fsdp = {shards}")
    rows = NamedSharding(mesh, P(BATCH_AXES))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), prompts)


def _overlaps(axes: str | tuple[str, ...] | None) -> bool:
    names = axes if isinstance(axes, tuple) else (axes,)
    return bool(set(names) & set(BATCH_AXES))
