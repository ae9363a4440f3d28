"""What XLA makes of the rounds of a preset on a GPU, found without one: kernels, memory, and all that they write.

Run from the repository's root: python -m benchmarks.gpu_program --preset qwen3-0.6b

Needs jax's CUDA plugin, which the extra [cuda] installs. XLA compiles ahead of time for the GPU that TARGET describes;
on a real one it would also try which way of multiplying is fastest, so that matmuls, and the partial sums that some
leave behind, may come out otherwise. Nothing is run, and no time is known.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import unbox
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.bench.networks import functions
from launch.bench.presets import PRESETS
from launch.bench.rounds import seated, some_rounds
from launch.measure import provenance
from models.config import eagle3_feature_layers
from specjax.plan import RolloutConfig
from specjax.rounds import Decoding, RoundState
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
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def written(line: Instruction) -> int:
    """The bytes of its result."""
    return sum(BYTES[dtype] * prod(dims) for dtype, dims in zip(line.dtypes, line.arrays, strict=True))


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


def compiled(function: Callable[..., Any], device: NamedSharding, donate: int, *args: PyTree) -> Any:
    """The program on that device, for arguments of these shapes."""
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), args)
    return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="of launch.bench")
    parser.add_argument("--layers", type=int, help="of the policy; by default the preset's")
    parser.add_argument("--batch", type=int, default=32, help="rows decoded together")
    parser.add_argument("--context", type=int, default=1024, help="positions that each of them can see")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 1, 3, 7])
    options = parser.parse_args()
    # The plugin compiles without its libraries and driver, but does not start without them.
    jax.config.update("jax_platforms", "cpu")
    preset, rows = PRESETS[options.preset], options.batch
    if layers := options.layers:
        features = eagle3_feature_layers(layers) if layers >= 7 else tuple(range(layers))
        preset = replace(preset, decoder=replace(preset.decoder, num_layers=layers, feature_layers=features))
    layers, decoder = preset.decoder.num_layers, preset.decoder
    policy, drafter, *inits = functions(preset)
    params = Params(*(jax.eval_shape(lambda key, init=init: unbox(init(key)), jax.random.key(0)) for init in inits))
    number = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompts = Prompts(jax.ShapeDtypeStruct((rows, options.context), jnp.int32), number, number)
    target = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    device = NamedSharding(topologies.make_mesh(target, (1,), ("device",)), P())
    print(f"{provenance('benchmarks.gpu_program')}\nfor       {device.mesh.devices.item().device_kind}, which is not there")
    print(f"preset    {options.preset}, {layers} layers, {rows} rows that see {options.context} positions each")
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    print(f"weights   {megabytes(weights)} MB, the draft's among them")
    for k in options.draft_lengths:
        config = RolloutConfig(group_size=1, max_new_tokens=BUDGET, draft_length=k)
        length = options.context + BUDGET + config.slack

        def some(params: Params, state: RoundState, count: jax.Array, config=config, k=k) -> RoundState:
            return some_rounds(Decoding(policy, drafter, params, config), k, state, count)

        def first(params: Params, prompts: Prompts, config=config, length=length) -> RoundState:
            return seated(Decoding(policy, drafter, params, config), prompts, length)

        state = jax.eval_shape(first, params, prompts)
        began = time.perf_counter()
        done = compiled(some, device, 1, params, state, jax.ShapeDtypeStruct((), jnp.int32))
        seconds, program = time.perf_counter() - began, Program(done.as_text())
        cache = rows, decoder.num_kv_heads, length, decoder.head_dim
        lines = program.launched(cache, 2 * layers)
        caches = [line for line in lines if line.elements >= prod(cache)]
        moved = [line for line in caches if "scatter" not in line.line and "dynamic-update-slice" not in line.line]
        rest = [line for line in lines if line not in caches]
        print(
            f"\nk = {k}: {len(lines)} kernels a round; {megabytes(done.memory_analysis().temp_size_in_bytes)} MB beside "
            f"weights and caches; {megabytes(sum(map(written, rest)))} MB written a round but for keys and values; "
            f"{len(moved)} copies of a cache; compiled in {seconds:.0f} s"
        )
        wide = [line for line in lines if any(decoder.vocab_size in dims for dims in line.arrays)]
        for line in wide:
            print(f"  of the vocabulary's size: {line.shape.split('{')[0]} {line.opcode} {line.scope}")


if __name__ == "__main__":
    main()
