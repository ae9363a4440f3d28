"""Compiled programs of a step with adapters: the frozen kernels are read, and nothing of their size is made."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest

from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.lora import LoraConfig, adapted_layers, init_adapters, with_scales
from models.params import init_params
from specjax.adapters import merged
from specjax.testing.hlo import Program
from specjax.train.gradients import accumulate
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.train.updates import UpdateConfig
from specjax.types import Params, TrainState
from tests.specjax.training import CONFIG, DECODER, GROUP, HEAD, count_fives, make_prompts, mesh_of, ragged_batch

# No kernel of the policy has the shape of another array, also not as a matrix.
SIZES = dict(hidden_size=24, intermediate_size=56, num_heads=4, num_kv_heads=2, head_dim=10)
WIDE = replace(DECODER, dtype="bfloat16", param_dtype="bfloat16", **SIZES)
WIDE_HEAD = replace(HEAD, dtype="bfloat16", hidden_size=24, feature_size=48)
POLICY = make_policy(WIDE)
DRAFTER = make_eagle3(WIDE_HEAD, POLICY)
LAYERS = adapted_layers(partial(init_decoder, WIDE), LoraConfig(rank=3))
UPDATES = replace(CONFIG, updates=UpdateConfig(minibatches=2), microbatches=2)
MESH = mesh_of()


def adapted_state() -> TrainState:
    inits = partial(init_adapters, LAYERS), partial(init_eagle3, WIDE_HEAD), partial(init_decoder, WIDE)
    adapters, draft, base = (init_params(init, jax.random.key(i), MESH) for i, init in enumerate(inits))
    return init_train_state(Params(adapters, draft, base=with_scales(base, LAYERS, MESH)), UPDATES, MESH)


def kernels() -> set[tuple[int, ...]]:
    """Return the shapes of the adapted kernels, also as matrices."""
    shapes = {(*layer.into, *layer.features) for layer in LAYERS}
    return shapes | {(math.prod(layer.into), math.prod(layer.features)) for layer in LAYERS}


def from_loops(jaxpr: Any) -> set[tuple[int, ...]]:
    """Return the shapes of what the loops of a jaxpr return: whatever they carry, and so may change."""
    found = set[tuple[int, ...]]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("scan", "while"):
            found |= {x.aval.shape for x in eqn.outvars}
        for inner in jax.tree.leaves(
            [*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found |= from_loops(getattr(inner, "jaxpr", inner))
    return found


def assert_only_read(program: Program) -> None:
    lines = [x for computation in program.computations.values() for x in computation]
    assert {dtype for x in lines for dtype, dims in zip(x.dtypes, x.arrays, strict=True) if dims in kernels()} == {
        "bf16"
    }
    for dims in kernels():
        assert not program.makers(dims)
    frozen = [x for x in program.computations[program.entry] if x.opcode == "parameter" and kernels() & {*x.arrays}]
    assert len(frozen) == len(LAYERS)
    assert {x.parameter for x in frozen} <= program.aliased.keys()


def test_an_update_has_no_gradient_or_moment_of_a_frozen_kernel_and_no_copy() -> None:
    """Nor does the loop over two updates carry one."""
    step = make_train_step(POLICY, DRAFTER, count_fives, UPDATES, MESH)
    traced = step.trace_half("update", adapted_state(), make_prompts())
    adapters = {x.shape for x in jax.tree.leaves(adapted_state().params.policy)}
    assert adapters <= from_loops(traced.jaxpr.jaxpr) and not kernels() & from_loops(traced.jaxpr.jaxpr)
    assert_only_read(Program(traced.lower().compile().as_text() or ""))


@pytest.mark.slow
def test_nor_has_a_step_in_one_program() -> None:
    step = make_train_step(POLICY, DRAFTER, count_fives, replace(UPDATES, updates=UpdateConfig()), MESH)
    assert_only_read(Program(step.lower(adapted_state(), make_prompts()).compile().as_text()))


def test_gradients_of_frozen_kernels_would_be_found() -> None:
    params, batch = replace(merged(adapted_state().params), draft={}), ragged_batch(8, 26, samples=GROUP)
    context = replace(Stages(POLICY, DRAFTER, count_fives, CONFIG, MESH).loss_context(batch), anchors=0)
    text = jax.jit(partial(accumulate, context)).lower(params, batch).compile().as_text()
    assert all(Program(text).makers((*layer.into, *layer.features)) for layer in LAYERS)
