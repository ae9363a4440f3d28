"""Compile rounds of a preset, and a training step, and count kernels, memory, writes, waits and collectives.

Run from the repository's root: python -m benchmarks.gpu.program [--preset qwen3-0.6b]

Nothing of the rounds runs, so no times are known. A loop or conditional may wait for the host to read its condition:
the loop over rounds once per round, those within a round at most as often as counted here.

`--absent` compiles the rounds for an H200 without one. That needs jax's CUDA plugin, which the extra [cuda] installs.
On a real GPU, XLA also autotunes matmuls: their kernels, and the partial sums that some of them write, may differ.
"""

import argparse
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import unbox
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from benchmarks.bench.models import Functions, block_functions, functions
from benchmarks.bench.presets import PRESETS, Preset
from benchmarks.bench.report import BenchSection, Results, Row
from launch.cli.recipes import load_recipe
from launch.costs.round_timer import first_rows, run_rounds
from launch.plan.devices import absent_gpus
from launch.rewards.reward_fn import make_reward
from launch.setup.experiment import build_experiment
from launch.setup.state import abstract_state
from models.config import eagle3_feature_layers
from specjax.parallel.mesh import AXES
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Instruction, Program, collectives
from specjax.train.train_step import TrainStep
from specjax.types import Params, Prompts, PyTree
from specjax.verify import VERIFIERS

BUDGET = 64
# Opcodes that move data to or from the host, and what names a call of the host.
HOST, CALLBACK = ("infeed", "outfeed", "send", "recv"), "callback"


def program_costs(lines: list[Instruction], compiled: jax.stages.Compiled) -> Row:
    """Return what lines of a program hold that may cost time on a GPU, and the program's temporary memory."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "loops or conditions": sum(line.opcode in ("while", "conditional") for line in lines),
        "calls of the host": sum(
            line.opcode in HOST or (line.opcode == "custom-call" and CALLBACK in line.line) for line in lines
        ),
        "collectives": len(collectives(lines)),
        "temporary MB": memory.temp_size_in_bytes / 1e6,
    }


def abstract(device: NamedSharding, tree: PyTree) -> PyTree:
    """Return the tree with each array replaced by its shape, dtype and device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def vocabulary_bytes(line: Instruction, vocabularies: set[int]) -> int:
    """Return the bytes of the results with an axis of a vocabulary's size or, since XLA merges axes, a multiple."""
    sizes = zip(line.sizes, line.arrays, strict=True)
    return sum(size for size, dims in sizes if any(dim % count == 0 for dim in dims for count in vocabularies))


def round_of(
    preset: Preset, networks: Functions, shapes: tuple[Params, Prompts], config: RolloutConfig, device: NamedSharding
) -> tuple[Row, list[str]]:
    """Compile rounds at the draft length. Return the counts, and lines about the arrays of the vocabulary's size."""
    decoder, (rows, context), k = preset.decoder, shapes[1].tokens.shape, config.draft_length
    phase, length = Phase(rows, context + BUDGET), context + BUDGET + config.slack

    def initial_state(params: Params, prompts: Prompts) -> RoundState:
        return first_rows(Decoding(networks.policy, networks.drafter, params, config), prompts, phase, blank=True)

    def rounds(params: Params, state: RoundState, count: Array) -> RoundState:
        return run_rounds(Decoding(networks.policy, networks.drafter, params, config), k, state, count)

    state, start = jax.eval_shape(initial_state, *shapes), time.perf_counter()
    args = abstract(device, (shapes[0], state, jax.ShapeDtypeStruct((), jnp.int32)))
    compiled = jax.jit(rounds, donate_argnums=1).lower(*args).compile()
    seconds, program = time.perf_counter() - start, Program(str(compiled.as_text()))
    cache = rows, decoder.num_kv_heads, length, decoder.head_dim
    lines, inside = (find(cache, 2 * decoder.num_layers) for find in (program.launched, program.loop))
    copies = [line for line in program.copies(inside, prod(cache)) if _is_cache(line, cache)]
    # A loop passes on what its body, whose kernels are not counted, wrote.
    writing = [line for line in lines if line.opcode != "while" and not _is_cache(line, cache)]
    products = [line for line in writing if line.scope.endswith("dot_general")]
    vocabularies = {decoder.vocab_size, preset.draft_vocab or decoder.vocab_size}
    of_vocabulary = {line: size for line in writing if (size := vocabulary_bytes(line, vocabularies))}
    row: Row = {
        "k": k,
        "kernels": len(lines),
        "copies of a cache": len(copies),
        **program_costs(inside, compiled),
        "written MB": sum(sum(line.sizes) for line in writing) / 1e6,
        "products MB": sum(sum(line.sizes) for line in products) / 1e6,
        "vocabulary MB": sum(of_vocabulary.values()) / 1e6,
        "laws and noise MB": sum(size for line, size in of_vocabulary.items() if line not in products) / 1e6,
        "compile s": seconds,
    }
    each = ((f"{line.shape.split('{')[0]} {line.scope}", size) for line, size in of_vocabulary.items())
    return row, [f"k = {k}, of the vocabulary's size: {what}, {size / 1e6:.1f} MB" for what, size in each]


def rounds(
    preset: Preset, networks: Functions, rows: int, context: int, configs: list[RolloutConfig], device: NamedSharding
) -> BenchSection:
    """Count what rounds with each of the options hold."""

    def initial_arrays() -> tuple[Params, Prompts]:
        key, numbers = jax.random.key(0), jnp.zeros(rows, jnp.int32)
        params = Params(unbox(networks.init_policy(key)), unbox(networks.init_draft(key)))
        return params, Prompts(jnp.zeros((rows, context), jnp.int32), lengths=numbers, id=numbers)

    # Nothing is allocated: the device may be absent.
    shapes = jax.eval_shape(initial_arrays)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes[0]))
    table: list[Row] = []
    notes = [
        f"{preset.decoder.num_layers} layers; {weights / 1e6:.0f} MB of weights with the draft's",
        "written: results of kernels other than keys and values; temporary: memory beside weights and caches",
        "products: results of matrix products, with partial sums; vocabulary: arrays of a vocabulary's size; laws and "
        "noise: these without the logits",
    ]
    for config in configs:
        row, more = round_of(preset, networks, shapes, config, device)
        table, notes = [*table, row], notes + more
    kind = next(iter(device.device_set)).device_kind
    return BenchSection(f"a round of {rows} rows that see {context} positions each, on {kind}", table, notes)


def step(recipe: str) -> BenchSection:
    """Compile a training step of the recipe, whose reward must be traced, and count what the whole program holds."""
    experiment = build_experiment(load_recipe(recipe))
    stages = experiment.stages(make_reward(None, experiment.problems.train, experiment.tokenizer))
    start = time.perf_counter()
    compiled = TrainStep(stages).lower(abstract_state(experiment), next(experiment.train_batches())).compile()
    seconds, program = time.perf_counter() - start, Program(str(compiled.as_text()))
    lines = [line for lines in program.computations.values() for line in lines]
    return BenchSection(f"a training step of {recipe}", [{**program_costs(lines, compiled), "compile s": seconds}])


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
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="preset of benchmarks.bench")
    parser.add_argument("--layers", type=int, help="layers of the policy; by default the preset's")
    parser.add_argument("--block", action="store_true", help="with a five-layer DSpark, not an EAGLE-3 head")
    parser.add_argument("--batch", type=int, default=32, help="rows decoded together")
    parser.add_argument("--context", type=int, default=1024, help="cached positions per row")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 1, 3, 7], help="to compile")
    parser.add_argument("--verifier", choices=VERIFIERS, default="rejection", help="verification method")
    parser.add_argument("--top-p", type=float, default=1.0, help="top-p of the sampling law; 1 cuts nothing")
    parser.add_argument("--recipe", help="recipe of which to compile a training step; by default none")
    parser.add_argument("--absent", action="store_true", help="compile the rounds for an H200 that is not there")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if not options.absent:
        devices = jax.devices()[:1]
    else:
        devices = absent_gpus("h200")
    preset = PRESETS[options.preset]
    if layers := options.layers:
        fewer = replace(preset.decoder, num_layers=layers, feature_layers=eagle3_feature_layers(layers))
        preset = replace(preset, decoder=fewer)
    results = Results("benchmarks.gpu.program", options.preset, options.json)
    mesh = Mesh(np.reshape(devices, (1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    # Tracing uses the devices of the mesh that is set.
    with jax.set_mesh(mesh):
        device = NamedSharding(mesh, P())
        networks = (block_functions if options.block else functions)(preset)
        law = SamplingLaw(top_p=options.top_p)
        config = RolloutConfig(group_size=1, max_new_tokens=BUDGET, verifier=options.verifier, law=law)
        configs = [replace(config, draft_length=k) for k in options.draft_lengths]
        section = rounds(preset, networks, options.batch, options.context, configs, device)
        results.add("rounds", section)
    if options.recipe is not None:
        results.add("step", step(options.recipe))


if __name__ == "__main__":
    main()
