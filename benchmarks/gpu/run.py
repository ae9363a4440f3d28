"""Run a part in a process of its own: whatever it does, the next part runs."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.bench.report import WIDTH, BenchSection, print_section
from benchmarks.gpu.parts import Part
from launch.comparison.stage_times import print_stage_times, read_reports

# Seconds before its limit at which a part gets SIGTERM. What it has measured is in its file.
GRACE = 5
# Minutes in which a part can show something.
LEAST = 0.75
# Fraction of the GPU's memory that JAX takes at the start of a part.
MEMORY = "0.92"
# Lines of a failed part that the summary repeats.
LAST = 8


class Outcome(NamedTuple):
    """End of a part.

    Attributes:
        ended:   "ok", "exit code N", the name of a signal, "stopped N s before its limit" or "skipped: REASON".
        seconds: Time it took.
        last:    Its last lines of output, if it failed.
    """

    ended: str
    seconds: float = 0.0
    last: tuple[str, ...] = ()


def run(part: Part, minutes: float, log: Path) -> Outcome:
    """Run the part for at most so many minutes, append its output to the log as it comes, and return the outcome."""
    if minutes < LEAST:
        return Outcome(f"skipped: {minutes:.1f} min are left")
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY, "PYTHONUNBUFFERED": "1"}
    start, begin = time.perf_counter(), log.stat().st_size
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *part.command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # A group, so that all of it can be killed, but no session: it must not outlive this one.
            process_group=0,
        )
    try:
        code = process.wait(max(60 * minutes - GRACE, 0))
        ending = "ok" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name
    except subprocess.TimeoutExpired:
        ending = f"stopped {GRACE} s before its limit of {minutes:.1f} min"
    finally:
        _end(process)
    text = log.read_bytes()[begin:].decode(errors="replace")
    if process.returncode < 0:
        with log.open("a", encoding="utf-8") as output:
            print_tables(part.results, Console(file=output, width=WIDTH, highlight=False, markup=False, emoji=False))
    last_lines = [line for line in text.splitlines() if line.strip()][-LAST:]
    return Outcome(ending, time.perf_counter() - start, () if ending == "ok" else tuple(last_lines))


def print_tables(results: Path, console: Console) -> None:
    """Print the tables of a part's file, as the part would have."""
    if not results.exists():
        return
    measured = json.loads(results.read_text(encoding="utf-8"))
    for section in measured.get("sections", {}).values():
        print_section(BenchSection(**section), console)
    if "arms" in measured:
        print_stage_times(read_reports(measured["arms"]), console)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started, which would hold memory of the GPU."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
