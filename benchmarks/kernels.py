"""Time rounds with and without each tuned kernel and each of XLA's flags, in turns.

Run from the repository's root: python -m benchmarks.kernels [--dtype bfloat16] [--cells 1,0 4,3] [--flags]

To measure a kernel, the round is also compiled with the plain operation of `specjax.kernels`. A flag is set for one
program only, as XLA_FLAGS=--NAME=VALUE would for all. Flags that this version of XLA does not know are reported and
skipped.

Two ratios are printed: of the shortest times, which other work on a shared machine disturbs least, and of the
pairs. The row "compiled again" is the same program compiled a second time; its difference is noise.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast, get_args
from unittest import mock

import jax

from benchmarks.bench.models import BenchNetworks, random_networks
from benchmarks.bench.presets import PRESETS, Preset, find_preset
from benchmarks.bench.timers import round_timer
from launch.timing import format_interval, format_provenance, interleaved
from models.config import Dtype
from specjax import kernels

# Optimisations to measure, with the tuned operations of each.
TRICKS = {
    "matmul": ("matmul",),
    "matmul_transposed": ("matmul_transposed",),
    "attend": ("attend",),
    "lone row": ("write", "while_loop", "switch"),
    "argmax": ("argmax",),
    "compiler_options": ("compiler_options",),
}
FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "wide vectors": {"xla_cpu_prefer_vector_width": 512},
        "no fusion emitters": {"xla_cpu_use_fusion_emitters": False},
        "oneDNN": {"xla_cpu_use_onednn": True},
        "YNNPACK": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
        "no YNNPACK": {"xla_cpu_experimental_ynn_fusion_type": ""},
        "matmuls on all cores": {"xla_cpu_multi_thread_eigen": True},
        "LLVM at level 1": {"xla_backend_optimization_level": 1},
    },
    "gpu": {
        "whole loops as graphs": {"xla_gpu_enable_command_buffer": "+WHILE,+CONDITIONAL"},
        "no graphs": {"xla_gpu_enable_command_buffer": ""},
        "short graphs": {"xla_gpu_graph_min_graph_size": 2},
        "Triton for any matmul": {"xla_gpu_triton_gemm_any": True},
        "no Triton matmuls": {"xla_gpu_enable_triton_gemm": False},
        "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
        "autotuning again": {"xla_gpu_autotune_level": 5},
    },
}


@contextmanager
def plain(*operations: str) -> Iterator[None]:
    """Use the plain versions of these operations in programs traced inside this context."""
    platform = jax.default_backend()
    other_operations = {
        name: operation for name, operation in vars(kernels.TUNED[platform]).items() if name not in operations
    }
    with mock.patch.dict(kernels.TUNED, {platform: cast(ModuleType, SimpleNamespace(**other_operations))}):
        yield


def compiled(
    networks: BenchNetworks, rows: int, k: int, preset: Preset, options: dict[str, Any] | None = None
) -> Callable[[], float]:
    """Compile a round and return a function that measures its seconds."""
    kinds = {k: (networks.drafter, k)}
    timer = round_timer(networks, networks.drafter, rows, preset.contexts[0], kinds, preset.rounds, options)
    return timer.start(networks.params)[k]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="preset of benchmarks.bench; by default this device's"
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), help="dtype of the computation; by default the preset's")
    cells = ["1,0", "2,0", "4,0", "1,3", "4,3", "8,3"]
    parser.add_argument("--context", type=int, help="cached positions per row; by default the preset's first")
    parser.add_argument("--vocab-size", type=int, help="vocabulary of the policy; by default the preset's")
    parser.add_argument("--cells", nargs="+", default=cells, help="cells to measure, each as ROWS,DRAFT_LENGTH")
    parser.add_argument("--without", nargs="*", choices=TRICKS, default=list(TRICKS), help="tuned kernels to measure")
    parser.add_argument("--flags", action="store_true", help="measure XLA's flags too")
    parser.add_argument("--repeats", type=int, default=9, help="timings of each program, in turns")
    options = parser.parse_args()
    name, preset = find_preset(options.preset)
    contexts = preset.contexts if options.context is None else (options.context,)
    decoder = replace(preset.decoder, dtype=options.dtype or preset.decoder.dtype)
    decoder = replace(decoder, vocab_size=options.vocab_size or decoder.vocab_size)
    preset = replace(preset, decoder=decoder, contexts=contexts)
    where = f"{name}, {preset.decoder.dtype}, context {preset.contexts[0]}"
    print(f"{format_provenance('benchmarks.kernels')}\npreset    {where}")
    print("rows k tokens  what                        least ms  ratio  of the pairs, with its 95% interval")
    networks, platform = random_networks(preset), jax.default_backend()
    tuned = {name: operations for name, operations in TRICKS.items() if name in options.without}
    for cell in options.cells:
        rows, k = map(int, cell.split(","))
        program = partial(compiled, networks, rows, k, preset)
        programs = {"as it is": program(), "compiled again": program()}
        for trick, operations in tuned.items() if platform in kernels.TUNED else ():
            if rows == 1 or trick != "lone row":
                with plain(*operations):
                    programs[f"without {trick}"] = program()
        for flag, value in FLAGS.get(platform, {}).items() if options.flags else ():
            try:
                programs[f"with {flag}"] = program(options=value)
            except jax.errors.JaxRuntimeError as error:
                print(f"{rows:4} {k} {rows * (k + 1):6}  with {flag:24} refused: {str(error).splitlines()[0][:60]}")
        measured = interleaved(programs, options.repeats)
        for way, times in measured.items():
            pairs = list(zip(measured["as it is"], times, strict=True))
            ratios = [base / seconds if way.startswith("with ") else seconds / base for base, seconds in pairs]
            ratio_of_minima = min(times) / min(measured["as it is"])
            ratio_of_minima = 1 / ratio_of_minima if way.startswith("with ") else ratio_of_minima
            line = f"{1e3 * min(times):9.3f}  {ratio_of_minima:5.3f}  {format_interval(ratios)}"
            print(f"{rows:4} {k} {rows * (k + 1):6}  {way:29} {line}", flush=True)


if __name__ == "__main__":
    main()
