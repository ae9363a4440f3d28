"""Timing side by side: what the benchmarks and `launch.bench` share."""

import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call, until what it returns is ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def without_start(whole: float, start: float) -> float:
    """What a measurement comes to without what it took to start it; as it is where noise hides the difference."""
    return whole - start if whole > start else whole


def in_turns(runs: Mapping[Name, Callable[[], Result]], repeats: int) -> dict[Name, list[Result]]:
    """What each returns, `repeats` times. They take turns in going first, which cancels a drift of the machine."""
    measured: dict[Name, list[Result]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            measured[name].append(runs[name]())
    return measured


def interval(
    values: Sequence[float], level: float = 0.95, center: Callable[..., np.ndarray] = np.median
) -> tuple[float, float, float]:
    """(center, low, high) of the values: by default their median, with its interval by bootstrap.

    Of fewer than six values all that they span: the median of five lies within them in less than 95% of all cases.
    """
    if len(values) < 6:
        return float(center(np.asarray(values), axis=0)), min(values), max(values)
    draws = np.random.default_rng(1).choice(np.asarray(values), (10_000, len(values)))
    low, high = np.quantile(center(draws, axis=1), ((1 - level) / 2, (1 + level) / 2))
    return float(center(np.asarray(values), axis=0)), float(low), float(high)


def geometric_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The center of ratios in which each counts, the rare bad one too."""
    return np.exp(np.mean(np.log(values), axis=axis))


def written(values: Sequence[float]) -> str:
    """The median and its 95% interval: `1.23 [1.2, 1.26]`."""
    return "{:.3g} [{:.3g}, {:.3g}]".format(*interval(values))


def origin(program: str) -> dict[str, str]:
    """The command, device and versions that a result names."""
    device = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    if jax.default_backend() == "cpu":
        device = f"{os.cpu_count()} cores of {_processor()}"
    return {
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "device": device,
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}",
    }


def _processor() -> str:
    """The CPU and its last cache, which decides how long a round of few rows takes; its architecture alone if unknown.

    Linux tells; "AMD EPYC, x86_64, cache of 32768K".
    """
    told, caches = platform.machine(), sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            told = f"{line.partition(':')[2].strip()}, {told}"
            break
    return f"{told}, cache of {caches[-1].read_text().strip()}" if caches else told


def provenance(program: str) -> str:
    """The same, a line each."""
    return "\n".join(f"{name:<10}{value}" for name, value in origin(program).items())
