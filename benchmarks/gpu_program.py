"""Compile rounds of a preset for a GPU that is not there, and print kernels, memory, writes and waits.

Run from the repository's root: python -m benchmarks.gpu_program --preset qwen3-0.6b

Needs jax's CUDA plugin, which the extra [cuda] installs. XLA compiles ahead of time for the GPU that TARGET describes.
Nothing runs, so no times are known. Two limits:
- On a real GPU, XLA also autotunes matmuls. Their kernels, and the partial sums that some of them write, may differ.
- A loop or conditional may wait for the host to read its condition: the loop over rounds once per round, those within a
  round at most as often as counted here.
"""

import argparse
import time
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import unbox
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from launch.bench.models import Functions, functions
from launch.bench.presets import PRESETS, Preset
from launch.costs.round_timer import first_rows, run_rounds
from launch.timing import format_provenance
from models.config import eagle3_feature_layers
from specjax.parallel.mesh import AXES
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState
from specjax.testing.hlo import Instruction, Program
from specjax.types import Params, Prompts, PyTree

TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""
BUDGET = 64
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def written(line: Instruction) -> int:
    """Return the bytes of an instruction's result."""
    return sum(BYTES[dtype] * prod(dims) for dtype, dims in zip(line.dtypes, line.arrays, strict=True))


def abstract(device: NamedSharding, tree: PyTree) -> PyTree:
    """Return the tree with each array replaced by its shape, dtype and device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def report(preset: Preset, networks: Functions, shapes: tuple[Params, Prompts], k: int, device: NamedSharding) -> None:
    """Compile rounds at draft length k and print the counts."""
    decoder, (rows, context) = preset.decoder, shapes[1].tokens.shape
    config = RolloutConfig(group_size=1, max_new_tokens=BUDGET, draft_length=k)
    phase, length = Phase(rows, context + BUDGET), context + BUDGET + config.slack

    def initial_state(params: Params, prompts: Prompts) -> RoundState:
        return first_rows(Decoding(networks.policy, networks.drafter, params, config), prompts, phase, blank=True)

    def rounds(params: Params, state: RoundState, count: Array) -> RoundState:
        return run_rounds(Decoding(networks.policy, networks.drafter, params, config), k, state, count)

    state, started = jax.eval_shape(initial_state, *shapes), time.perf_counter()
    args = abstract(device, (shapes[0], state, jax.ShapeDtypeStruct((), jnp.int32)))
    compiled = jax.jit(rounds, donate_argnums=1).lower(*args).compile()
    seconds, program = time.perf_counter() - started, Program(str(compiled.as_text()))
    cache = rows, decoder.num_kv_heads, length, decoder.head_dim
    lines = program.launched(cache, 2 * decoder.num_layers)
    caches = [line for line in lines if _is_cache(line, cache)]
    everything = program.loop(cache, 2 * decoder.num_layers)
    waits = [line for line in everything if line.opcode in ("while", "conditional")]
    copies = [line for line in program.copies(everything, prod(cache)) if _is_cache(line, cache)]
    memory, kept = compiled.memory_analysis(), sum(map(written, lines)) - sum(map(written, caches))
    assert memory is not None
    print(
        f"\nk = {k}: {len(lines)} kernels a round, {memory.temp_size_in_bytes / 1e6:.0f} MB beside weights and caches, "
        f"{kept / 1e6:.0f} MB written but for keys and values, {len(copies)} copies of a cache, "
        f"{len(waits)} loops or conditions within it; "
        f"compiled in {seconds:.0f} s"
    )
    for line in lines:
        if any(decoder.vocab_size in dims for dims in line.arrays):
            print(f"  of the vocabulary's size: {line.shape.split('{')[0]} {line.scope}")


def _is_cache(line: Instruction, cache: tuple[int, ...]) -> bool:
    """Return whether the result is the keys or values of one layer, with axes in any order.

    cache: (rows, heads, length, head_dim) of the policy's. The draft's cache may be longer.
    """
    rows, heads, length, size = cache
    return any(
        len(dims) == 4 and max(dims) >= length and prod(dims) % (rows * heads * size) == 0 for dims in line.arrays
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="preset of launch.bench")
    parser.add_argument("--layers", type=int, help="layers of the policy, at least 7; by default the preset's")
    parser.add_argument("--batch", type=int, default=32, help="rows decoded together")
    parser.add_argument("--context", type=int, default=1024, help="cached positions per row")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 1, 3, 7], help="to compile")
    options = parser.parse_args()
    # The plugin can compile without CUDA's libraries and a driver, but cannot start as a backend without them.
    jax.config.update("jax_platforms", "cpu")
    preset, shape = PRESETS[options.preset], (options.batch, options.context)
    if layers := options.layers:
        fewer = replace(preset.decoder, num_layers=layers, feature_layers=eagle3_feature_layers(layers))
        preset = replace(preset, decoder=fewer)
    networks, key = functions(preset), jax.random.key(0)
    params = jax.eval_shape(lambda: Params(unbox(networks.init_policy(key)), unbox(networks.init_draft(key))))
    number = jnp.zeros(options.batch, jnp.int32)
    prompts = jax.eval_shape(lambda: Prompts(jnp.zeros(shape, jnp.int32), lengths=number, id=number))
    target = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    mesh = Mesh(np.reshape(target.devices, (1, 1, 1)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    print(
        f"{format_provenance('benchmarks.gpu_program')}\ntarget    {target.devices[0].device_kind}, which is not there"
    )
    print(f"preset    {options.preset}, {preset.decoder.num_layers} layers; {weights / 1e6:.0f} MB with the draft's")
    print(f"rows      {options.batch} that see {options.context} positions each")
    # Tracing uses the devices of the mesh that is set.
    with jax.set_mesh(mesh):
        for k in options.draft_lengths:
            report(preset, networks, (params, prompts), k, NamedSharding(mesh, P()))


if __name__ == "__main__":
    main()
