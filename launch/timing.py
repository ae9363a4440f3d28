"""Time programs in turns, and record the machine and versions of a measurement."""

import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
# Fewest values whose range may cover their median in 95% of cases.
FEWEST = 6


def time_call(run: Callable[[], object]) -> float:
    """Return the seconds from one call until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def minus_startup(total: float, startup: float) -> float:
    """Return total minus start-up time, or total if that is not positive."""
    return total - startup if total > startup else total


def interleaved(runs: Mapping[Name, Callable[[], Result]], repeats: int) -> dict[Name, list[Result]]:
    """Call every run `repeats` times, in turns, and return the results by name."""
    *_, results = turn_by_turn(runs, repeats)
    return results


def turn_by_turn(runs: Mapping[Name, Callable[[], Result]], repeats: int) -> Iterator[dict[Name, list[Result]]]:
    """Call every run `repeats` times, in turns. After each turn, yield the results so far by name."""
    results = {name: list[Result]() for name in runs}
    for turn in range(repeats):
        for name, result in one_turn(runs, turn).items():
            results[name].append(result)
        yield results


def one_turn(runs: Mapping[Name, Callable[[], Result]], turn: int) -> dict[Name, Result]:
    """Call every run once and return the results by name.

    Every other turn reverses the order, so that a drift of the machine cancels out.
    """
    return {name: runs[name]() for name in list(runs)[:: -1 if turn % 2 else 1]}


def interval(
    values: Sequence[float], level: float = 0.95, center: Callable[..., np.ndarray] = np.median
) -> tuple[float, float, float]:
    """Return (center, low, high): the median by default, and its bootstrap interval.

    With fewer than FEWEST values the interval is their range, which covers the median in less than 95% of cases.
    """
    if len(values) < FEWEST:
        return float(center(np.array(values), axis=0)), min(values), max(values)
    draws = np.random.default_rng(1).choice(np.array(values), (10_000, len(values)))
    low, high = np.quantile(center(draws, axis=1), ((1 - level) / 2, (1 + level) / 2))
    return float(center(np.array(values), axis=0)), float(low), float(high)


def geometric_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the geometric mean. For ratios: unlike the median, it reflects a rare bad one."""
    return np.exp(np.mean(np.log(values), axis=axis))


def format_interval(values: Sequence[float]) -> str:
    """Return the median and its 95% interval as text: `1.23 [1.2, 1.26]`. One value has no interval."""
    return show_interval(interval(values))


def show_interval(found: tuple[float, float, float], form: str = ".3g", unit: str = "") -> str:
    """Return (center, low, high) as text: `1.20x [1.10, 1.30]`, or without the ends if they are equal."""
    center, low, high = (f"{x:{form}}" for x in found)
    return f"{center}{unit}" if found[1] == found[2] else f"{center}{unit} [{low}, {high}]"


def describe_interval(count: int) -> str:
    """Return what `interval` returns beside the center of `count` values, for a title: " with 95% intervals"."""
    return "" if count < 2 else " with their range" if count < FEWEST else " with 95% intervals"


def provenance(program: str) -> dict[str, str]:
    """Return the command, device and versions that a result was measured with."""
    return {"command": " ".join(["python -m", program, *sys.argv[1:]])} | machine()


def machine() -> dict[str, str]:
    """Return the device and versions that measure."""
    device = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    if jax.default_backend() == "cpu":
        device = f"{os.cpu_count()} cores of {_processor()}"
    return {
        "device": device,
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}",
    }


def format_provenance(program: str) -> str:
    """Return `provenance` as text, one line per entry."""
    return "\n".join(f"{name:<10}{value}" for name, value in provenance(program).items())


def _processor() -> str:
    """Return the CPU and its last-level cache, for example "AMD EPYC, x86_64, cache of 32768K".

    The cache size decides the speed of small batches.

    Both are read from Linux; elsewhere only the architecture is known.
    """
    name, caches = platform.machine(), sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = f"{line.partition(':')[2].strip()}, {name}"
            break
    return f"{name}, cache of {caches[-1].read_text().strip()}" if caches else name
