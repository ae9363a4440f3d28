"""Measure everything that needs a GPU, in order of value, within so many minutes: `make gpu`.

Run from the repository's root: python -m benchmarks.gpu --minutes 23

Each part (benchmarks.gpu.parts) is a process with a time limit of its own. DIR/gpu.txt gets its output as it comes, and
the outcomes at the end, also if all is stopped. DIR/PART.json gets its results: of some parts as they are measured, of
others at their end. A part that fails, is killed or outlasts its limit does not end the others. Nothing is fetched from
the network.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import TRAINING, Part, parts
from benchmarks.gpu.run import Outcome, run

NAMES = [part.name for part in parts(Path())]
# The device is asked in a process of its own: JAX would keep its memory from the parts.
DEVICE = "import jax; from launch.timing import format_provenance; print(jax.default_backend())"
DEVICE += '; print(format_provenance("benchmarks.gpu"))'
STARTS_WITHIN = 300


def provenance(words: list[str]) -> tuple[str, str]:
    """Return JAX's platform, and the command, device and versions as text; "none" and an error if JAX fails."""
    command = [sys.executable, "-c", DEVICE, *words]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=STARTS_WITHIN)
    except subprocess.TimeoutExpired:
        return "none", f"JAX did not start within {STARTS_WITHIN} s"
    if completed.returncode:
        return "none", completed.stderr.strip()[-1000:]
    platform, _, text = completed.stdout.partition("\n")
    return platform, text


def time_limit(left: float, remaining: list[Part]) -> float:
    """Return the limit of the first remaining part, in minutes.

    If less is left than the parts need, the first ones, which are worth the most, keep their own limits.
    """
    first, planned = remaining[0], sum(part.minutes for part in remaining if not part.missing)
    return min(left, first.minutes * max(1.0, left / max(planned, first.minutes)))


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return a line for each part, and the last lines of those that failed."""
    lines = [f"{name:<10} {each.seconds:6.0f} s  {each.ended}" for name, each in outcomes.items()]
    for name, each in outcomes.items():
        if each.last:
            lines += ["", f"last of {name}:", *(f"  {line[:200]}" for line in each.last)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=23, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=NAMES, help="parts to run; by default all")
    parser.add_argument("--model", type=Path, help="policy for the part `model`: see benchmarks.gpu.model")
    parser.add_argument("--training", default=TRAINING, help="its recipe and options of launch.compare, quoted")
    parser.add_argument("--tiny", action="store_true", help="rehearse at tiny shapes, on any device")
    options = parser.parse_args()
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model = {options.model}: must be a directory")
    end = time.monotonic() + 60 * options.minutes
    platform, details = provenance(sys.argv[1:])
    if platform != "gpu" and not options.tiny:
        parser.error(f"needs a GPU that JAX can use, and finds: {platform}; --tiny rehearses without one\n{details}")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    log, outcomes = options.out / "gpu.txt", dict[str, Outcome]()
    log.write_text(details, encoding="utf-8")
    every = parts(options.out, tiny=options.tiny, model=options.model, training=shlex.split(options.training))
    selection = [part for part in every if part.name in options.parts]
    try:
        for index, part in enumerate(selection):
            minutes = time_limit(max(end - time.monotonic(), 0) / 60, selection[index:])
            with log.open("a", encoding="utf-8") as output:
                print(f"\n==== {part.name}: python -m {shlex.join(part.command)}\n", file=output, flush=True)
            outcome = outcomes[part.name] = run(part, minutes, log)
            print(f"{part.name}: {outcome.ended}, {outcome.seconds:.0f} s", flush=True)
    finally:
        with log.open("a", encoding="utf-8") as output:
            output.write(f"\n==== outcomes\n{summary(outcomes)}")
    print(f"\n{summary(outcomes)}\n{log}")
    return int(any(outcome.last for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
