"""Time the start of a run, until its first step has ended, and the steps after it, in turns over checkouts.

Run from the repository's root: python -m benchmarks.start [RECIPE] [--checkouts . ../before] [options of launch.train]

Each start is a process of its own, `launch.train RECIPE`, ended after its last timed step: cold with an empty
compile cache, then warm with the cache that the cold one left. Steps are those of the warm one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from launch.timing import format_interval, format_provenance, interleaved

STEPS_ALONE = ("--speedup.steps", "0", "--probe-every", "0", "--profile-step", "0")
POLL_S = 0.1


class Start(NamedTuple):
    """Seconds to the end of the first step and of each step after it, and the peak of the process's memory in GiB."""

    seconds: float
    steps: list[float]
    peak_gib: float


def start(checkout: Path, words: list[str], steps: int, cache: Path, limit_s: float) -> Start:
    """Start a run, end it after so many steps, and return what it took.

    words: recipe and options of launch.train. cache: directory of compiled programs.

    Raises RuntimeError with the end of its output if the run ends before, or takes longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "launch.train", *words, *STEPS_ALONE, "--out", f"{out}/run"]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout.resolve())}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        began, first = time.perf_counter(), None
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=said, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            while len(lines := _steps(Path(out) / "run" / "metrics.jsonl")) < steps:
                seconds = time.perf_counter() - began
                first = seconds if lines and first is None else first
                if process.poll() is not None or seconds > limit_s:
                    said.seek(0)
                    raise RuntimeError(
                        f"{len(lines)} of {steps} steps after {seconds:.0f} s in {checkout}: "
                        f"{said.read().decode(errors='replace')[-2000:]}"
                    )
                time.sleep(POLL_S)
            seconds = time.perf_counter() - began if first is None else first
            timed = lines[1:steps]
            peak = lines[steps - 1].get("memory/host_peak_gib") or 0.0
            return Start(seconds, [x["time/step"] for x in timed], peak)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole lines of steps. Step 0 is the evaluation before the first step."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [x for x in (json.loads(line) for line in lines if line.endswith("}")) if x.get("step")]


def cold_and_warm(checkout: Path, words: list[str], steps: int, limit_s: float) -> tuple[Start, Start]:
    """Return a start with an empty compile cache, and a second one."""
    with tempfile.TemporaryDirectory() as cache:
        return start(checkout, words, 1, Path(cache), limit_s), start(checkout, words, steps, Path(cache), limit_s)


def main() -> None:
    """Print the seconds of each checkout, and over the first's, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="tiny", help="recipe of launch.train")
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path()], help="roots of the project's versions")
    parser.add_argument("--turns", type=int, default=3, help="starts of each, cold and warm")
    parser.add_argument("--steps", type=int, default=1, help="steps of a warm start; the first is not timed as a step")
    parser.add_argument("--limit-s", type=float, default=1800, help="limit of one start, in seconds")
    args, options = parser.parse_known_args()
    print(format_provenance("benchmarks.start"))
    words = [args.recipe, *options]
    runs = {path: partial(cold_and_warm, path, words, args.steps, args.limit_s) for path in args.checkouts}
    measured = interleaved(runs, args.turns)
    # Of each turn the median step: a step with fewer tokens is shorter.
    rows = {
        "cold start": lambda pair: pair[0].seconds,
        "warm start": lambda pair: pair[1].seconds,
        "step": lambda pair: statistics.median(pair[1].steps),
        "peak memory, GiB": lambda pair: pair[1].peak_gib,
    }
    for kind in rows if args.steps > 1 else list(rows)[:2]:
        first = [rows[kind](pair) for pair in measured[args.checkouts[0]]]
        for path, pairs in measured.items():
            values = [rows[kind](pair) for pair in pairs]
            ratios = [other / own for own, other in zip(first, values, strict=True)]
            turns = ", ".join(f"{x:.2f}" for x in values)
            print(f"{kind:<17} {path!s:<10} {format_interval(values)}, {format_interval(ratios)} times; turns {turns}")
    if args.steps > 1:
        for path, pairs in measured.items():
            print(f"steps from the second on, {path}:", *(f"{x:.2f}" for pair in pairs for x in pair[1].steps))


if __name__ == "__main__":
    main()
