"""Profile rounds of a preset: the device's time by the operation that each kernel was traced from.

Run from the repository's root: python -m benchmarks.gpu.profile [--preset qwen3-0.6b]

A kernel that is not XLA's own, such as a product by cuBLAS within a CUDA graph, is listed by its name. The time of an
undisturbed round is printed beside the sum of its kernels.
"""

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from benchmarks.bench.models import BenchNetworks, random_networks
from benchmarks.bench.presets import PRESETS
from benchmarks.bench.report import BenchSection, Results, Row
from benchmarks.bench.timers import round_timer
from specjax.testing.hlo import Program

# Operations of a round that the table names; the rest are summed.
NAMED = 14


def kernel_seconds(directory: Path) -> Iterator[tuple[str, str, float]]:
    """Yield (HLO instruction, kernel, seconds) of every kernel in the profiles in the directory."""
    for path in directory.rglob("*.xplane.pb"):
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        # A GPU's kernels have planes of their own; beside them the host's launches are listed.
        for plane in [plane for plane in planes if plane.name.startswith("/device:GPU")] or planes:
            for line in plane.lines:
                for event in line.events:
                    if instruction := dict(event.stats).get("hlo_op"):
                        yield str(instruction), event.name, event.duration_ns * 1e-9


def operation(scope: str) -> str:
    """Return the module path of a traced operation, without jit, loops, the layer's number and the primitive."""
    skipped = re.compile(r"jit\(|while|body|cond|closed_call|shard_map")
    names = [part for part in scope.split("/")[:-1] if not skipped.match(part)]
    return re.sub(r"_\d+", "", "/".join(names)) or "other"


def profiled(run: Callable[[], object], program: Program) -> dict[str, float]:
    """Return the seconds of each operation in one call."""
    lines = {line.name: line for lines in program.computations.values() for line in lines}
    seconds = defaultdict[str, float](float)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run())
        for instruction, kernel, duration in kernel_seconds(Path(directory)):
            # A kernel in a CUDA graph is listed under the graph's instruction; a fusion's kernel is named after it.
            line = lines.get(instruction) or lines.get(re.sub(r"_(\d+)$", r".\1", kernel))
            # The time of a loop is the time of its kernels, which are listed too.
            if line is None or line.opcode not in ("while", "conditional", "call"):
                seconds[operation(line.scope) if line else re.split(r"[<(\d]", kernel)[0]] += duration
    return seconds


def profile(networks: BenchNetworks, rows: int, context: int, k: int, count: int) -> BenchSection:
    """Profile `count` rounds at draft length k."""
    timer = round_timer(networks, networks.drafter, rows, context, {k: (networks.drafter, k)}, count)
    measure = timer.start(networks.params)[k]
    undisturbed = min(measure() for _ in range(5))
    operations = profiled(measure, Program(timer.program_text(k)))
    assert operations, f"the profiler saw no kernel; an undisturbed round takes {1e3 * undisturbed:.3f} ms"
    total = sum(operations.values())
    most = sorted(operations.items(), key=lambda item: -item[1])[:NAMED]
    rest = total - sum(seconds for _, seconds in most)
    table: list[Row] = [
        {"operation": name, "ms": 1e3 * seconds / count, "share": seconds / total}
        for name, seconds in [*most, ("all others", rest)]
    ]
    notes = [f"kernels of a round: {1e3 * total / count:.3f} ms; an undisturbed round: {1e3 * undisturbed:.3f} ms"]
    return BenchSection(f"a round at k = {k}: {rows} rows that see {context} positions", table, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="preset of benchmarks.bench")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="rows decoded together")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], help="cached positions per row")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 3], help="draft lengths to profile")
    parser.add_argument("--rounds", type=int, default=16, help="rounds in a profile")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    results = Results("benchmarks.gpu.profile", options.preset, options.json)
    networks = random_networks(PRESETS[options.preset])
    for rows, context, k in (
        (rows, context, k) for rows in options.batches for context in options.contexts for k in options.draft_lengths
    ):
        name = f"{rows} rows, {context} positions, k = {k}"
        results.add(name, profile(networks, rows, context, k, options.rounds))


if __name__ == "__main__":
    main()
