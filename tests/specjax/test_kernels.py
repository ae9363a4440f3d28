"""Every tuned kernel computes the function in `specjax.kernels.plain`, on one device and on a mesh of eight."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh

from specjax import kernels
from specjax.kernels import cpu, gpu, plain
from specjax.parallel.mesh import BATCH_AXES
from specjax.testing.hlo import Program, collectives
from specjax.types import LayerCache, PyTree
from tests.refusals import refuses
from tests.specjax.training import AS_SHIPPED, mesh_of

ROWS, TENSOR = P(BATCH_AXES), P(None, "tensor")


@dataclass(frozen=True)
class Case:
    """Arguments of an operation, by shape, with the mesh axes that shard each; other arguments as keywords.

    exact:  tuned and plain results are bit-identical.
    smooth: the operation is differentiable, so gradients are compared too.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    options: tuple[tuple[str, Any], ...] = ()
    exact: bool = False
    smooth: bool = False


def attended(operation: Callable, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((len(q), q.shape[1], k.shape[2]), bool), k.shape[2] - q.shape[1])
    return operation(q, LayerCache(k, v), mask)


def written(operation: Callable, into: jax.Array, new: jax.Array) -> jax.Array:
    return operation(into, new, jnp.arange(len(into)) % 3 + 1)


def looped(operation: Callable, k: jax.Array, v: jax.Array) -> PyTree:
    """Run a loop whose turns shift each cache by one position and count turns."""

    def body(state: PyTree) -> PyTree:
        cache, trips = state
        return LayerCache(*(jnp.roll(x, 1, axis=2) for x in cache)), trips + 1

    return operation(lambda state: state[1] < 3, body, (LayerCache(k, v), jnp.int32(0)))


def switched(operation: Callable, k: jax.Array, v: jax.Array) -> PyTree:
    branches = [lambda state, by=by: (LayerCache(by * state[0].k, state[0].v), state[1] + by) for by in (1, 2)]
    return operation(jnp.int32(1), branches, (LayerCache(k, v), jnp.int32(0)))


def run_once(operation: Callable, k: jax.Array, v: jax.Array) -> PyTree:
    """Double the caches twice: once if a condition holds that does, once if one holds that does not."""
    state = LayerCache(k, v), jnp.int32(1)
    for condition in (True, False):
        state = operation(jnp.bool_(condition), lambda state: jax.tree.map(lambda x: 2 * x, state), state)
    return state


def grouped(operation: Callable, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply groups of three, zero and four rows; the last row belongs to no group."""
    return operation(x, weights, jnp.array([3, 0, 4], jnp.int32))


CALLS: dict[str, Callable] = {"attend": attended, "write": written, "while_loop": looped, "switch": switched}
CALLS |= {"grouped": grouped, "run_if": run_once}
CASES = (
    *(
        Case("matmul", ((*batch, *inner), (*inner, *features)), (ROWS, specs), options, smooth=True)
        for batch in ((2,), (1, 2), (4, 1), (4, 3))
        for inner, features, options, specs in (
            ((8,), (2, 4), (), TENSOR),
            ((2, 4), (8,), (("contract", 2),), P("tensor")),
        )
    ),
    *(
        Case("matmul_transposed", ((*batch, 8), (16, 8)), (ROWS, P("tensor")), smooth=True)
        for batch in ((2,), (4, 3), (1, 1))
    ),
    *(
        Case("attend", ((4, count, heads, 8), cache, cache), (ROWS, ROWS, ROWS))
        for cache in ((4, 2, 9, 8), (4, 2, 1024, 8))
        for count, heads in ((1, 2), (1, 4), (3, 4), (9, 2), (17, 2))
    ),
    *(
        Case("write", ((rows, heads, 9, 4), (rows, heads, 3, 4)), (ROWS, ROWS), exact=True)
        for rows, heads in ((4, 2), (1, 2), (1, 1))
    ),
    *(
        Case(name, ((rows, heads, 9, 4),) * 2, (ROWS, ROWS), exact=True)
        for name in ("while_loop", "switch")
        for rows, heads in ((4, 2), (1, 2), (1, 1))
    ),
    Case("grouped", ((8, 6), (3, 6, 4)), (P(), P()), smooth=True),
    Case("argmax", ((4, 3, 50),), (ROWS,), exact=True),
    Case("computed_once", ((4, 3, 1, 8),), (ROWS,), exact=True),
)


def compiled(function: Callable, *args: jax.Array) -> str:
    """Return the function, compiled with XLA's default flags instead of those of tests."""
    options = AS_SHIPPED | kernels.compiler_options(args[0].dtype)
    text = jax.jit(function, compiler_options=options).lower(*args).compile().as_text()
    assert text
    return text


def run(operations: Any, case: Case, *args: jax.Array) -> PyTree:
    operation = partial(getattr(operations, case.name), **dict(case.options))
    return CALLS[case.name](operation, *args) if case.name in CALLS else operation(*args)


def arguments(case: Case, dtype: str) -> list[jax.Array]:
    """Return random arguments. For `argmax`, they are small integers, so that the maximum occurs often."""
    rng = np.random.default_rng(1)
    made = [rng.standard_normal(shape) for shape in case.shapes]
    return [jnp.asarray(np.round(x) if case.name == "argmax" else x, dtype) for x in made]


def assert_same(got: PyTree, wanted: PyTree, case: Case, dtype: str) -> None:
    tolerance = 0.0 if case.exact else 1e-5 if dtype == "float32" else 2e-2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=tolerance, atol=tolerance)


@partial(jax.jit, static_argnums=(0, 1))
def run_and_slopes(implementations: tuple, case: Case, *args: jax.Array) -> list[tuple[PyTree, PyTree]]:
    """Return the results and, of a smooth operation, the gradients of a function of it, by these modules."""

    def both(operations: Any) -> tuple[PyTree, PyTree]:
        def total(*args: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(run(operations, case, *args).astype(jnp.float32)))

        return run(operations, case, *args), jax.grad(total, tuple(range(len(args))))(*args) if case.smooth else ()

    return [both(operations) for operations in implementations]


def test_every_tuned_operation_has_a_case():
    tuned = {name for name in kernels.__all__ if hasattr(cpu, name)}
    assert tuned == {case.name for case in CASES} | {"compiler_options"}


@pytest.mark.parametrize("name", ["run_if", "switch"])
def test_branches_on_a_gpu_equal_plain_ones(name: str):
    case = Case(name, ((4, 2, 9, 4),) * 2, (ROWS, ROWS), exact=True)
    args = arguments(case, "float32")
    assert_same(*run_and_slopes((gpu, plain), case, *args), case, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.shapes[0]}")
def test_tuned_kernels_equal_plain_ones(case: Case, dtype: str):
    """On one device, and on a mesh that shards the arguments where their rows divide over it."""
    args = arguments(case, dtype)
    with jax.set_mesh(mesh_of(1, 1, 1)):
        found, wanted = run_and_slopes((kernels, plain), case, *args)
    assert_same(found, wanted, case, dtype)
    with jax.set_mesh(mesh_of(2, 2, 2)):
        if args[0].shape[0] % 4 == 0:
            args = [jax.device_put(x, spec) for x, spec in zip(args, case.specs, strict=True)]
        (found,) = run_and_slopes((kernels,), case, *args)
    assert_same(found, wanted, case, dtype)


def test_a_bfloat16_product_makes_no_float32_kernel_and_gathers_neither_factor():
    x, kernel = (jnp.ones(shape, "bfloat16") for shape in ((4, 3, 64), (64, 4, 32)))

    def lines(function: Callable, *args: jax.Array) -> list:
        return [line for lines in Program(compiled(function, *args)).computations.values() for line in lines]

    alone = lines(kernels.matmul, x, kernel)
    (product,) = (line for line in alone if line.opcode == "dot")
    assert product.line.split(" = ")[1].startswith("f32")
    assert "convert" not in {line.opcode for line in alone if line.elements == kernel.size}
    with jax.set_mesh(mesh_of(2, 1, 4)):
        sharded = [jax.device_put(x, P("data")), jax.device_put(kernel, TENSOR)]
        both = lines(lambda *args: jax.grad(lambda *args: jnp.sum(kernels.matmul(*args) ** 2), (0, 1))(*args), *sharded)
    assert {line.opcode.removesuffix("-start") for line in collectives(both)} == {"all-reduce"}


def test_a_loop_transposes_a_tied_head_before_its_first_trip():
    table, x = jnp.ones((96, 32)), jnp.ones((4, 32))

    def some(x: jax.Array, table: jax.Array, count: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, x + kernels.matmul_transposed(carry[1], table)[:, :32]

        return kernels.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), x))[1]

    program = Program(compiled(some, x, table, jnp.int32(9)))
    (loop,) = program.loops(carries=(32, 96), times=1)
    assert any(line.opcode == "dot" for line in loop) and not program.copies(loop, table.size)


@pytest.mark.parametrize(("dtype", "used"), [("float32", False), ("bfloat16", True)])
def test_only_bfloat16_programs_use_ynnpack(dtype: str, used: bool):
    x = jnp.ones((4, 64), dtype)
    product = compiled(partial(jnp.matmul, preferred_element_type="float32"), x, x.T)
    assert ("ynn_fusion" in product) == used


@pytest.mark.parametrize(("cores", "spread"), [(2, False), (16, False), (32, True)])
def test_a_matmul_is_parallel_if_devices_have_enough_cores(monkeypatch: pytest.MonkeyPatch, cores: int, spread: bool):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert kernels.compiler_options(jnp.dtype("float32"))["xla_cpu_multi_thread_eigen"] is spread


def test_platform_and_environment_select_the_kernels(monkeypatch: pytest.MonkeyPatch):
    x, mesh = jnp.ones((3, 6), "bfloat16"), mesh_of(1, 1, 1).abstract_mesh
    assert mesh.abstract_device is not None

    def tuned() -> bool:
        # A new function each time, because jax caches traces.
        return "preferred_element_type=float32" in str(jax.make_jaxpr(lambda x: kernels.matmul(x, x.T))(x))

    assert tuned()
    gpu = replace(mesh.abstract_device, device_kind="NVIDIA H200", platform="gpu")
    with use_abstract_mesh(mesh.update(abstract_device=gpu)):
        assert not tuned()
    monkeypatch.setenv("SPECJAX_KERNELS", "plain")
    assert not tuned() and kernels.compiler_options(x.dtype) == {}
    monkeypatch.setenv("SPECJAX_KERNELS", "fast")
    with refuses("SPECJAX_KERNELS = fast"):
        tuned()


@pytest.mark.parametrize("devices, waits", [(1, False), (2, True)])
def test_only_programs_on_several_cpu_devices_are_waited_for(devices: int, waits: bool):
    class Pending:
        waited = False

        def block_until_ready(self) -> "Pending":
            self.waited = True
            return self

    pending = Pending()
    assert kernels.finished({"a": pending}, mesh_of(devices, 1, 1)) == {"a": pending}
    assert pending.waited == waits


@pytest.mark.parametrize("devices, calls", [(1, True), (2, False)])
def test_draws_for_one_gpu_call_the_kernel_of_jax(devices: int, calls: bool):
    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (4,))

    with kernels.quick_draws(mesh_of(devices)):
        text = jax.jit(draw).trace(jax.random.key(0)).lower(lowering_platforms=("cuda",)).as_text()
    assert ("cu_threefry2x32" in text) == calls
    assert not jax.config.jax_threefry_gpu_kernel_lowering  # type: ignore[attr-defined]
