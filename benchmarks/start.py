"""Time the start of a run, until its first step has ended, in turns over checkouts of the project.

Run from the repository's root: python -m benchmarks.start [RECIPE] [--checkouts . ../before] [options of launch.train]

Each start is a process of its own, `launch.train RECIPE --steps 1` without a closing comparison: cold with an empty
compile cache, then warm with the cache that the cold one left.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from launch.timing import format_interval, format_provenance, interleaved

ONE_STEP = ("--steps", "1", "--speedup.steps", "0", "--probe-every", "0", "--profile-step", "0")
POLL_S = 0.1


def seconds_to_first_step(checkout: Path, words: list[str], cache: Path, limit_s: float) -> float:
    """Return the seconds from the start of a run to its first line of metrics of a step.

    words: recipe and options of launch.train. cache: directory of compiled programs.

    Raises RuntimeError with the end of its output if the run ends before, or takes longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "launch.train", *words, *ONE_STEP, "--out", f"{out}/run"]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout.resolve())}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=said, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            while not _stepped(Path(out) / "run" / "metrics.jsonl"):
                seconds = time.perf_counter() - start
                if process.poll() is not None or seconds > limit_s:
                    said.seek(0)
                    raise RuntimeError(
                        f"no step after {seconds:.0f} s in {checkout}: {said.read().decode(errors='replace')[-2000:]}"
                    )
                time.sleep(POLL_S)
            return time.perf_counter() - start
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _stepped(metrics: Path) -> bool:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    # The newest line may not be whole. Step 0 is the evaluation before the first step.
    return any(json.loads(line).get("step") for line in lines if line.endswith("}"))


def cold_and_warm(checkout: Path, words: list[str], limit_s: float) -> tuple[float, float]:
    """Return the seconds of a start with an empty compile cache, and of a second one."""
    with tempfile.TemporaryDirectory() as cache:
        start = partial(seconds_to_first_step, checkout, words, Path(cache), limit_s)
        return start(), start()


def main() -> None:
    """Print the seconds of each checkout, and the first's over each other's, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="tiny", help="recipe of launch.train")
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path()], help="roots of the project's versions")
    parser.add_argument("--turns", type=int, default=3, help="starts of each, cold and warm")
    parser.add_argument("--limit-s", type=float, default=1800, help="limit of one start, in seconds")
    args, options = parser.parse_known_args()
    print(format_provenance("benchmarks.start"))
    runs = {path: partial(cold_and_warm, path, [args.recipe, *options], args.limit_s) for path in args.checkouts}
    measured = interleaved(runs, args.turns)
    for number, kind in enumerate(("cold", "warm")):
        first = [pair[number] for pair in measured[args.checkouts[0]]]
        for path, pairs in measured.items():
            seconds = [pair[number] for pair in pairs]
            ratios = [other / own for own, other in zip(first, seconds, strict=True)]
            turns = ", ".join(f"{x:.1f}" for x in seconds)
            print(
                f"{kind}  {path!s:<24} {format_interval(seconds)} s to the end of the first step, "
                f"{format_interval(ratios)} times those of the first row; turns {turns}"
            )


if __name__ == "__main__":
    main()
