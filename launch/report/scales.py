"""Axis ticks, and numbers as text."""

import math

import numpy as np


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` evenly spaced round numbers. The first is at most `low`, the last at least `high`."""
    if low == high == 0:
        high = 1.0
    elif high - low <= CONSTANT * max(abs(low), abs(high)):
        # Values are constant up to rounding: widen the range, so that tick labels differ.
        spread = abs(high) or 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / count
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    lowest, highest = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [multiple * step for multiple in range(lowest, highest + 1)]


def tick_labels(values: list[float], percent: bool = False) -> list[str]:
    """Return the ticks as text, all with the same number of decimals and the same unit (k, M, G, or e-n)."""
    if percent:
        values = [100 * value for value in values]
    step, most = abs(values[1] - values[0]), max(map(abs, values))
    unit, suffix = next(((unit, suffix) for unit, suffix in UNITS if most >= 10 * unit), (1.0, ""))
    if most < 1e-3:
        exponent = math.floor(math.log10(most))
        unit, suffix = 10.0**exponent, f"e{exponent}"
    exact = (digits for digits in range(10) if abs(round(step / unit, digits) - step / unit) < 1e-6 * step / unit)
    digits = next(exact, 9)
    return [_zero(f"{value / unit:.{digits}f}", suffix) + ("%" if percent else "") for value in values]


# Relative difference below which float32 values differ only by rounding.
CONSTANT = 1e-5
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def _zero(text: str, suffix: str) -> str:
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}") + suffix


def number(value: float, percent: bool = False) -> str:
    """Return a value as text with about four digits."""
    if percent:
        return f"{100 * value:.1f}%"
    if value == round(value) and abs(value) < 1e5:
        return f"{value:.0f}"
    for unit, suffix in UNITS:
        if abs(value) >= 10 * unit:
            return f"{np.format_float_positional(value / unit, 4, fractional=False, trim='-')}{suffix}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return seconds as text, in s, min or h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
