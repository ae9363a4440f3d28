"""The counts of a program's operations are right. Most programs here are compiled for the CPU."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.bench.models import Functions, functions
from benchmarks.bench.presets import PRESETS, LongTail, Preset
from benchmarks.bench.sections.decoding import BLOCK, EAGLE3
from benchmarks.gpu import program
from benchmarks.gpu.step_programs import StepPrograms, policy_params, step_networks
from launch.errors import ConfigError
from launch.plan.devices import COMPILER_OPTIONS, OPTION_SETS, PLAN_OPTIONS, absent_gpus
from launch.plan.programs import compile_by_any
from models.config import DecoderConfig, ExpertsConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, eagle3_like, init_eagle3, make_eagle3
from models.params import abstract_params
from specjax import kernels
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import AXES
from specjax.rollout.generate import per_shard, prepare
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw, pick, process_logits
from specjax.testing.hlo import Instruction, Program
from specjax.types import Params, PolicyOutput, Prompts, PyTree, Rollout
from tests.whole_rows import squares, training_program


def reported(draft_lengths: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *further: str) -> dict[str, Any]:
    """Return the report's section on rounds, for each draft length."""
    options = f"--preset tiny --batch 3 --context 16 --draft-lengths {draft_lengths} --json {tmp_path / 'x.json'}"
    monkeypatch.setattr("sys.argv", ["program", *options.split(), *further])
    program.main()
    return json.loads((tmp_path / "x.json").read_text())["sections"]["rounds"]


def test_a_row_for_every_draft_length_and_a_line_for_all_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    section = reported("0 1", monkeypatch, tmp_path)
    plain, drafting = section["rows"]
    assert 30 < plain["kernels"] < drafting["kernels"]
    for row, tokens in ((plain, 1), (drafting, 2)):
        assert row["copies of a cache"] == row["calls of the host"] == row["collectives"] == 0
        of_logits = rf"k = {row['k']}, of the vocabulary's size: f32\[{3 * tokens},256\] .*unembed"
        assert any(re.match(of_logits, note) for note in section["notes"])
        logits = row["vocabulary MB"] - row["laws and noise MB"]
        assert 3 * tokens * 256 * 4e-6 <= round(logits, 9) <= row["products MB"] < row["written MB"]


def test_arrays_of_a_vocabulary_are_counted_also_where_axes_are_merged():
    for shape, expected in (
        ("f32[3,256]{1,0}", 3072),
        ("bf16[1024]{0}", 2048),
        ("(s32[3]{0}, f32[3,100]{1,0}, f32[100,4]{1,0})", 2800),
        ("f32[3,250]{1,0}", 0),
        ("(s32[3]{0}, f32[])", 0),
    ):
        line = Instruction("body", "x", shape, "fusion", "")
        assert program.vocabulary_bytes(line, {256, 100}) == expected, shape


def test_a_block_draft_applies_the_vocabulary_head_once_at_any_draft_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    section = reported("1 3", monkeypatch, tmp_path, "--block")
    for k, tokens in ((1, 3), (3, 9)):
        of_head = [x for x in section["notes"] if x.startswith(f"k = {k}, ") and "draft/Decoder.unembed" in x]
        assert len(of_head) == 1 and f"f32[{tokens},256]" in of_head[0], of_head


def test_a_loop_within_a_round_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """XLA may add loops of its own on a CPU, depending on the version of jax."""
    (before,) = reported("0", monkeypatch, tmp_path)["rows"]

    def looping(preset: Preset) -> Functions:
        made = functions(preset)

        def apply(*args: Any, **options: Any) -> PolicyOutput:
            output = made.policy.apply(*args, **options)
            logits = jax.lax.while_loop(lambda x: jnp.max(x) > 1e9, lambda x: 0.5 * x, output.logits)
            return replace(output, logits=logits)

        return made._replace(policy=replace(made.policy, apply=apply))

    monkeypatch.setattr(program, "functions", looping)
    (after,) = reported("0", monkeypatch, tmp_path)["rows"]
    assert after["loops or conditions"] == before["loops or conditions"] + 1


def test_a_host_callback_is_counted():
    def called(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: x, x, x)

    x = jnp.ones(3)
    for function, count in ((called, 1), (jnp.sin, 0)):
        compiled = jax.jit(function).lower(x).compile()
        assert program.program_costs(lines_of(compiled), compiled)["calls of the host"] == count


ROWS, MATRICES, INNER, OUTER = 65_536, 128, 2048, 768


@pytest.fixture
def h100s() -> Iterator[list[Any]]:
    """Return two absent H100s to compile for. Skips the test without jax's CUDA plugin."""
    try:
        devices = absent_gpus("h100", 2)
    except ConfigError as error:
        pytest.skip(str(error))
    # Programs for absent devices can be written to the compile cache, but not read from it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update(name, 1e9)
    yield devices
    jax.config.update(name, before)


def mesh_over(devices: list[Any]) -> Mesh:
    """Return a mesh of these devices along `fsdp`."""
    return Mesh(np.reshape(np.array(devices), (1, -1, 1, 1)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.fixture
def h100(h100s: list[Any]) -> Mesh:
    return mesh_over(h100s[:1])


def compiled_for(mesh: Mesh, function: Callable[..., Any], *shapes: Any) -> Any:
    """Return a program compiled for a mesh. shapes: trees of (shape, dtype) for its arguments."""
    shaped = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    args = [jax.tree.map(lambda x: shaped(*x), each, is_leaf=is_shape) for each in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*args).compile(COMPILER_OPTIONS)


def is_shape(x: object) -> bool:
    return isinstance(x, tuple) and isinstance(x[1], str)


def lines_of(compiled: Any) -> list[Any]:
    return [line for lines in Program(compiled.as_text()).computations.values() for line in lines]


def temporary_gib(compiled: Any) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / 2**30


# Qwen3-30B-A3B with 8,192 tokens.
X, SIZES = ((ROWS, INNER), "bfloat16"), ((MATRICES,), "int32")
UP, DOWN = ((MATRICES, INNER, OUTER), "bfloat16"), ((MATRICES, OUTER, INNER), "bfloat16")


def layer_of_experts(x: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    return x + kernels.grouped(jax.nn.silu(kernels.grouped(x, up, sizes)), down, sizes)


def test_on_a_gpu_a_grouped_product_does_not_multiply_every_row_by_every_matrix(h100: Mesh):
    """The gradient of the matrices is the largest array. XLA's own operation multiplies every row by every matrix."""
    for operation, sound in (lambda *args: kernels.grouped(*args), True), (jax.lax.ragged_dot, False):

        def loss(*args: jax.Array, operation: Any = operation) -> jax.Array:
            return jnp.sum(operation(*args).astype(jnp.float32) ** 2)

        compiled = compiled_for(h100, jax.grad(loss, argnums=(0, 1)), X, UP, SIZES)
        largest, temporary = max(line.elements for line in lines_of(compiled)), temporary_gib(compiled)
        if sound:
            assert largest <= MATRICES * INNER * OUTER and temporary < 3
        else:
            assert largest >= ROWS * MATRICES * OUTER and temporary > 12


def test_on_a_gpu_the_buffers_of_several_layers_of_experts_are_not_held_at_once(h100: Mesh):
    def layers(x: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
        for _ in range(6):
            x = layer_of_experts(x, up, down, sizes)
        return x

    # Two buffers of 0.3 GiB in each layer.
    assert temporary_gib(compiled_for(h100, layers, X, UP, DOWN, SIZES)) < 2.5


def test_on_a_gpu_the_rows_of_experts_are_not_kept_for_gradients_that_are_put_off(h100: Mesh):
    def loss(x: jax.Array, weights: list[tuple[jax.Array, jax.Array]], sizes: jax.Array) -> jax.Array:
        for up, down in weights:
            x = layer_of_experts(x, up, down, sizes)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def temporary(layers: int) -> float:
        return temporary_gib(compiled_for(h100, jax.grad(loss, argnums=(0, 1)), X, [(UP, DOWN)] * layers, SIZES))

    # A layer keeps its input, of 0.25 GiB, for the backward pass.
    assert temporary(10) - temporary(4) < 6 * 0.3


def test_on_gpus_weights_are_gathered_in_the_compute_dtype(h100s: list[Any]):
    """Also where the backward pass computes a layer again."""
    size = dict(hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=2048, dtype="bfloat16")
    experts = ExpertsConfig(num_experts=8, active=2, intermediate_size=512)
    decoder = DecoderConfig(**size, intermediate_size=1536, num_layers=2, feature_layers=(0,), experts=experts)
    policy, mesh = make_policy(decoder, remat="full"), mesh_over(h100s)
    params = abstract_params(partial(init_decoder, decoder), mesh)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    tokens, start = (jax.ShapeDtypeStruct(shape, "int32", sharding=rows) for shape in ((8, 256), (8,)))

    def loss(params: PyTree, tokens: jax.Array, start: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.log_softmax(policy.apply(params, tokens, start).logits.astype(jnp.float32))[..., 0])

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss)).lower(params, tokens, start)
        lines = lines_of(lowered.compile(COMPILER_OPTIONS))
    gathers = [line for line in lines if line.opcode.startswith("all-gather")]
    large = [line.line for line in gathers if line.elements > decoder.hidden_size * 64 and "f32" in line.dtypes]
    assert len(gathers) > 2 * decoder.num_layers and not large


def test_on_a_gpu_top_p_keeps_no_float32_copy_of_the_logits(h100: Mesh):
    """Each pass of its search reads the bfloat16 logits, and computes the weights of the tokens from them."""

    def law_of(logits: jax.Array, token: jax.Array) -> jax.Array:
        return pick(process_logits(logits, SamplingLaw(top_p=0.9)), token)

    compiled = compiled_for(h100, law_of, ((8, 32_000), "bfloat16"), ((8,), "int32"))
    lines = lines_of(compiled)
    fused = {name for x in lines if x.opcode == "fusion" for name in x.references}
    launched = [x for x in lines if x.computation not in fused]
    assert any(x.opcode == "while" and (8, 32_000) in x.arrays for x in launched)
    assert not [x for x in launched if ("f32", (8, 32_000)) in zip(x.dtypes, x.arrays, strict=True)]


@pytest.mark.parametrize("fsdp, tensor, shared", [(2, 1, 2), (1, 2, 1)])
def test_on_gpus_training_holds_no_scores_of_whole_rows(h100s: list[Any], fsdp: int, tensor: int, shared: int):
    """Neither an update nor a distillation has an array with two axes of a row's length, and cuDNN is divided.

    Also if `tensor` does not divide the heads of keys, of which there are `shared`.
    """
    size = dict(hidden_size=256, num_heads=8, num_kv_heads=shared, head_dim=64, vocab_size=512, dtype="bfloat16")
    decoder = DecoderConfig(**size, intermediate_size=512, num_layers=2, feature_layers=(0, 1))
    mesh = Mesh(np.reshape(h100s, (1, fsdp, 1, tensor)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    lowered = training_program(decoder, eagle3_like(decoder, 512), mesh, 2304)
    compiled = lowered.compile(PLAN_OPTIONS)
    assert not squares(compiled.as_text(), 2304)
    rows = [line for line in lines_of(compiled) if "fmhaSoftmax" in line.line]
    heads = decoder.num_heads // tensor
    assert rows and all(line.arrays[0] in {(1, 2304, heads, 64), (1, heads, 2304, 64)} for line in rows), rows[0].line


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("draft, lengths, layers", [(EAGLE3, (0, 3), 1), (BLOCK, (7,), 5)])
def test_on_a_gpu_both_programs_of_a_step_with_adapters_fit(
    draft: str, lengths: tuple[int, ...], layers: int, h100: Mesh
):
    """It has the shapes of the part `lora`. A rollout copies no frozen weights."""
    preset, shapes = PRESETS["qwen3-8b"], ((2, 128), (2,), (2,))
    networks = step_networks(preset, draft, policy_params(preset, 32, h100, None), h100, None)
    prompts = Prompts(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    steps = StepPrograms(networks, prompts, 16, LongTail(median=256, factor=4), lengths, microbatches=4)
    state = bytes_per_device((networks.trained, 2 * [replace(networks.trained, base=())])) / 2**30
    for name, lowered in steps.lower():
        compiled, _ = compile_by_any(name, lowered, OPTION_SETS)
        assert state + temporary_gib(compiled) < 75
        if name == "generate":
            caches = 32 * 1160 * (2 * 36 * 8 * 128 + 2 * layers * 8 * 128) * 2 / 2**30
            assert temporary_gib(compiled) < caches + 4


def test_on_a_gpu_a_rollout_copies_no_cache_and_reads_an_8_bit_draft_in_8_bits(h100: Mesh):
    """Neither admission nor the choice of a draft length doubles the caches. Loops carry the draft in 8 bits."""
    size = dict(hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=2048, dtype="bfloat16")
    decoder = DecoderConfig(**size, intermediate_size=1536, num_layers=1, feature_layers=(0,))
    head = Eagle3Config(**size, intermediate_size=1024, feature_size=512, draft_vocab_size=2048)
    policy = make_policy(decoder)
    drafter = make_eagle3(head, policy)
    drafter = replace(drafter, head=replace(drafter.head, eight_bit="int8"))
    inits = partial(init_decoder, decoder), partial(init_eagle3, head)
    params = Params(*(abstract_params(init, h100) for init in inits))
    slots, window = 16, 4096
    options: Any = dict(draft_lengths=(0, 2), verifier="coupled", phases=((slots, window),))
    config = RolloutConfig(group_size=4, max_new_tokens=window - 8, **options)
    generate = per_shard(speculative_rollout, policy, drafter, config, h100)

    def run(params: Params, prompts: Prompts, step: jax.Array, chosen: jax.Array) -> Rollout:
        return generate(prepare(policy, drafter, params), prompts, (step, step), chosen)

    shapes = (8, 8), (8,), (8,), (), (1,)
    shaped = partial(jax.ShapeDtypeStruct, dtype="int32", sharding=NamedSharding(h100, PartitionSpec()))
    tokens, lengths, ids, step, chosen = map(shaped, shapes)
    with jax.set_mesh(h100):
        lowered = jax.jit(run).lower(params, Prompts(tokens, lengths, ids), step, chosen)
        compiled = lowered.compile(COMPILER_OPTIONS)
    lines, positions = lines_of(compiled), window + config.slack
    caches = 2 * 2 * slots * decoder.num_kv_heads * positions * decoder.head_dim * 2 / 2**30
    assert caches < temporary_gib(compiled) < 1.7 * caches, temporary_gib(compiled) / caches
    kernel_shapes = {x.shape for x in jax.tree.leaves(params.draft) if x.ndim > 1}
    carried = [pair for x in lines if x.opcode == "while" for pair in zip(x.dtypes, x.arrays, strict=True)]
    assert {shape for dtype, shape in carried if dtype == "s8"} >= kernel_shapes
    fused = {name for x in lines if x.opcode == "fusion" for name in x.references}
    sizes = {math.prod(shape) for shape in kernel_shapes}
    of_weights = [x for x in lines if x.opcode == "convert" and "/draft/" in x.scope and x.elements in sizes]
    assert of_weights and all(x.computation in fused for x in of_weights)
