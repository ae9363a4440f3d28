"""What XLA's flags do to a round, autoregressive and drafting: seconds without a flag over seconds with it, paired.

Run from the repository's root: python -m benchmarks.xla_flags [--preset qwen3-0.6b] [--dtype bfloat16]

Flags are set for one program alone, as XLA_FLAGS=--NAME=VALUE does for all. What this version of XLA does not know, or
does not take for a single program, is named and left out. Without a flag means with
specjax.parallel.mesh.decoding_options.
"""

import argparse
from dataclasses import replace
from typing import Any, get_args

import jax

from launch.bench.models import random_networks
from launch.bench.presets import PRESETS, find_preset
from launch.bench.timers import round_timer
from launch.timing import format_interval, format_provenance, interleaved
from models.config import Dtype

NONE = "none"
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="of launch.bench; by default the one for this device")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="of the computation; by default the preset's")
    parser.add_argument("--batch", type=int, nargs="+", help="rows decoded together; by default the preset's one")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each, in turns")
    options = parser.parse_args()
    name, preset = find_preset(options.preset)
    preset = replace(preset, decoder=replace(preset.decoder, dtype=options.dtype or preset.decoder.dtype))
    print(format_provenance("benchmarks.xla_flags"))
    print(f"preset    {name}, {preset.decoder.dtype}, context {preset.contexts[0]}")
    print("batch k  flag                    ms a round  without / with         compile s")
    networks = random_networks(preset)
    candidates = CANDIDATES.get(jax.default_backend(), {})
    for batch in options.batch or [preset.batch]:
        for k in options.draft_lengths:
            kind = {k: (networks.drafter, k)}
            cell = networks, networks.drafter, batch, preset.contexts[0], kind, preset.rounds
            timers, runs, refused = {}, {}, {}
            for flag, value in ({NONE: None} | candidates).items():
                try:
                    timers[flag] = round_timer(*cell, options=value)
                    runs[flag] = timers[flag].start(networks.params)[k]
                except jax.errors.JaxRuntimeError as error:
                    refused[flag] = str(error).splitlines()[0]
            measured = interleaved(runs, options.repeats)
            for flag, timer in timers.items():
                ratios = [a / b for a, b in zip(measured[NONE], measured[flag], strict=True)]
                median = 1e3 * sorted(measured[flag])[len(ratios) // 2]
                interval, compile_s = format_interval(ratios), timer.compile_seconds[k]
                print(f"{batch:5} {k}  {flag:22} {median:11.3f}  {interval:22} {compile_s:.1f}", flush=True)
            for flag, why in refused.items():
                print(f"{batch:5} {k}  {flag:22} refused: {why[:70]}", flush=True)


if __name__ == "__main__":
    main()
