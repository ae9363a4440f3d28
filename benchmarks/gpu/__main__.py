"""Measure what needs a GPU, in order of value, within so many minutes: `make gpu`.

Run from the repository's root: python -m benchmarks.gpu

Each part (benchmarks.gpu.parts) is a process with a time limit of its own. DIR/gpu.txt gets its output as it comes, and
the outcomes at the end, also if all is stopped. DIR/PART.json gets its results after every timed turn; the tables of a
part that is killed are printed from there. A part that fails, is killed or outlasts its limit does not end the others.
The last line names the parts that were not measured to the end. Nothing is fetched from the network.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from itertools import accumulate, chain, count
from pathlib import Path

from benchmarks.gpu.parts import Part, parts
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


def deadlines(selection: list[Part], minutes: float) -> list[float]:
    """Return when each part must end, in minutes from the start. What a part does not need goes to the next one.

    If there are fewer minutes than the parts need, the first ones, which are worth the most, keep their limits. If
    there are more, all get more.
    """
    planned = list(accumulate(part.minutes for part in selection))
    return [min(minutes, end * max(1.0, minutes / planned[-1])) for end in planned]


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return a line for each part, and the last lines of those that failed."""
    lines = [f"{name:<10} {each.seconds:6.0f} s  {each.ended}" for name, each in outcomes.items()]
    for name, each in outcomes.items():
        if each.last:
            lines += ["", f"last of {name}:", *(f"  {line[:200]}" for line in each.last)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="for all parts together")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="directory of the results; OUT-2, .. if it has some"
    )
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=NAMES, help="parts to run; by default all")
    parser.add_argument("--tiny", action="store_true", help="rehearse at tiny shapes, on any device")
    options = parser.parse_args()
    begin = time.monotonic()
    platform, details = provenance(sys.argv[1:])
    if platform != "gpu" and not options.tiny:
        parser.error(f"needs a GPU that JAX can use, and finds: {platform}; --tiny rehearses without one\n{details}")
    # Nothing that an earlier call measured is overwritten.
    numbered = (options.out.with_name(f"{options.out.name}-{number}") for number in count(2))
    options.out = next(path for path in chain([options.out], numbered) if not (path / "gpu.txt").exists())
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    log, outcomes = options.out / "gpu.txt", dict[str, Outcome]()
    log.write_text(details, encoding="utf-8")
    selection = [part for part in parts(options.out, tiny=options.tiny) if part.name in options.parts]
    try:
        for part, deadline in zip(selection, deadlines(selection, options.minutes), strict=True):
            minutes = max(deadline - (time.monotonic() - begin) / 60, 0)
            with log.open("a", encoding="utf-8") as output:
                print(f"\n==== {part.name}: python -m {shlex.join(part.command)}\n", file=output, flush=True)
            outcome = outcomes[part.name] = run(part, minutes, log)
            print(f"{part.name}: {outcome.ended}, {outcome.seconds:.0f} s", flush=True)
    finally:
        with log.open("a", encoding="utf-8") as output:
            output.write(f"\n==== outcomes\n{summary(outcomes)}")
    print(f"\n{summary(outcomes)}\n{log}")
    if rest := [name for name, outcome in outcomes.items() if outcome.ended != "ok"]:
        print(f"not measured to the end: --parts {' '.join(rest)}")
    return int(any(outcome.last for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
