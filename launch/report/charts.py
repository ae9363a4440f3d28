"""Charts as SVG: lines over steps, stacked bars, histograms.

Each chart is as wide as a phone's screen. One SVG unit is one pixel; text is 11 units high.
"""

import json
from collections.abc import Sequence
from html import escape

import numpy as np

from launch.report.scales import number, tick_labels, ticks
from launch.report.series import Series, limits, stretches, thin

WIDTH, HEIGHT = 400, 210
TOP, BOTTOM, RIGHT = 8, 24, 14
# Width of one character of a label.
CHARACTER = 7.2
# Nested SVG that clips lines to the plot area, with a margin for their width.
PLANE = f'<svg width="{WIDTH}" height="{HEIGHT - BOTTOM + 3}">'


class Frame:
    """Axes of a chart, and the mapping from values to coordinates.

    low, high: edges of the x axis.
    y:         ticks of the y axis; the first and the last are its edges.
    """

    def __init__(self, low: float, high: float, y: list[float], percent: bool = False) -> None:
        self._y, self._labels = y, tick_labels(y, percent)
        self.left = 10 + CHARACTER * max(map(len, self._labels))
        self.low, self.high = low, high if high > low else low + 1

    def x(self, value: np.ndarray | float) -> np.ndarray:
        return self.left + np.subtract(value, self.low) / (self.high - self.low) * (WIDTH - RIGHT - self.left)

    def y(self, value: np.ndarray | float) -> np.ndarray:
        height = np.subtract(value, self._y[0]) / (self._y[-1] - self._y[0])
        return HEIGHT - BOTTOM - height * (HEIGHT - BOTTOM - TOP)

    def grid(self) -> str:
        parts = []
        for value, label in zip(self._y, self._labels, strict=True):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick end" x="{self.left - 6:.1f}" y="{y + 3.5:.1f}">{label}</text>')
        return "".join(parts)

    def x_labels(self) -> str:
        shown = [tick for tick in ticks(self.low, self.high, 4) if self.low <= tick <= self.high and tick % 1 == 0]
        if len(shown) < 2:
            shown = [self.low, self.high]
        return "".join(self.x_label(value, label) for value, label in zip(shown, tick_labels(shown), strict=True))

    def x_label(self, value: float, label: str) -> str:
        # Keep a long label inside the picture.
        x = min(float(self.x(value)), WIDTH - CHARACTER * len(label) / 2)
        return f'<text class="tick middle" x="{x:.1f}" y="{HEIGHT - 7}">{label}</text>'


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    hint: str = "",
    percent: bool = False,
    zero: bool = False,
    reference: float | None = None,
    span: tuple[int, int] | None = None,
) -> str:
    """Return a chart of values over steps, each series with its running mean. Empty if there are no values.

    Args:
        title:     caption.
        series:    lines; those without values are not drawn.
        hint:      explanation below the title.
        percent:   show values as percentages.
        zero:      include 0 in the y axis.
        reference: value at which a dashed horizontal line is drawn.
        span:      first and last step of the x axis. None: those of the series.
    """
    series = [each for each in series if len(each.values)]
    if not series:
        return ""
    low, high = limits(list(series))
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if reference is not None:
        low, high = min(low, reference), max(high, reference)
    first_step, last_step = span or (min(int(s.steps[0]) for s in series), max(int(s.steps[-1]) for s in series))
    y = ticks(low, high)
    if percent:
        y = [tick for tick in y if -1e-9 <= tick <= 1 + 1e-9] if 0 <= low and high <= 1 and low < high else y
    frame = Frame(first_step, last_step, y, percent)
    body = [frame.grid(), frame.x_labels(), PLANE]
    if reference is not None:
        level = float(frame.y(reference))
        body.append(f'<path class="reference" d="M{frame.left:.1f} {level:.1f}H{WIDTH - RIGHT}"/>')
    lines = []
    for each in series:
        if each.noisy and not each.dashed:
            body.append(f'<path class="raw c{each.color}" d="{_path(frame, each.steps, each.values)}"/>')
        lines.append(
            f'<path class="line c{each.color}{" dashed" if each.dashed else ""}" '
            f'd="{_path(frame, each.steps, each.smooth)}"/>'
        )
        if not each.noisy:
            points = zip(frame.x(each.steps), frame.y(each.values), strict=True)
            lines += (f'<circle class="c{each.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in points)
    legend = [
        (f"b{each.color}{' dashed' if each.dashed else ''}", each.label, number(float(each.smooth[-1]), percent))
        for each in series
    ]
    return _figure(title, hint, legend, "".join([*body, *lines, "</svg>"]), _hover(frame, series, percent))


def bar_chart(title: str, steps: np.ndarray, parts: dict[str, tuple[int, np.ndarray]], *, hint: str = "") -> str:
    """Return a chart of stacked seconds with one bar per step. More than 24 steps are averaged in groups.

    parts: color and values [steps] by label.
    """
    total = np.sum([values for _, values in parts.values()], axis=0)
    groups = np.array_split(np.arange(len(steps)), min(len(steps), 24))
    frame = Frame(0, len(groups), ticks(0.0, float(max(total[group].mean() for group in groups))))
    body = [frame.grid()]
    width = float(frame.x(1) - frame.x(0))
    inner = min(width * 0.72, 44)
    for place, group in enumerate(groups):
        base = 0.0
        left = float(frame.x(place)) + (width - inner) / 2
        label = f"step {steps[group[0]]}" + (f" to {steps[group[-1]]}" if len(group) > 1 else "")
        for name, (color, values) in parts.items():
            value = float(values[group].mean())
            top, bottom = float(frame.y(base + value)), float(frame.y(base))
            base += value
            body.append(
                f'<rect class="f{color}" x="{left:.1f}" y="{top:.1f}" width="{inner:.1f}" '
                f'height="{max(bottom - top, 0):.2f}"><title>{escape(label)}: {name} {number(value)} s</title></rect>'
            )
        if place % -(-len(groups) // 6) == 0:
            body.append(frame.x_label(place + 0.5, str(steps[group[0]])))
    legend = [(f"b{color}", name, "") for name, (color, _) in parts.items()]
    return _figure(title, hint, legend, "".join(body), "")


def histogram(title: str, groups: dict[str, tuple[int, np.ndarray]], top: int, *, hint: str = "") -> str:
    """Return a histogram of integers 0 .. top. The y axis is the fraction of values in a group.

    groups: color and values by label.
    """
    bins = min(top + 1, 24)
    edges = np.linspace(0, top + 1, bins + 1)
    fractions = {name: np.histogram(values, edges)[0] / max(len(values), 1) for name, (_, values) in groups.items()}
    frame = Frame(0, top + 1, ticks(0.0, max(float(each.max()) for each in fractions.values())), percent=True)
    slot = (WIDTH - RIGHT - frame.left) / bins
    width = slot * 0.84 / len(groups)
    body = [frame.grid(), frame.x_labels()]
    for group, (name, (color, _)) in enumerate(groups.items()):
        for place, fraction in enumerate(fractions[name]):
            if fraction > 0:
                low, high = int(np.ceil(edges[place])), int(np.ceil(edges[place + 1])) - 1
                y = float(frame.y(fraction))
                body.append(
                    f'<rect class="f{color}" x="{frame.left + place * slot + slot * 0.08 + group * width:.1f}" '
                    f'y="{y:.1f}" width="{width:.1f}" height="{float(frame.y(0.0)) - y:.1f}"><title>{escape(name)}: '
                    f"{fraction:.1%} of {low}{f' to {high}' if high > low else ''} tokens</title></rect>"
                )
    legend = [(f"b{color}", name, f"mean {number(float(values.mean()))}") for name, (color, values) in groups.items()]
    return _figure(title, hint, legend, "".join(body), "")


def _path(frame: Frame, steps: np.ndarray, values: np.ndarray) -> str:
    parts = []
    for stretch in stretches(steps):
        kept = thin(values[stretch])
        points = zip(frame.x(steps[stretch][kept]), frame.y(values[stretch][kept]), strict=True)
        parts.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points))
    return "".join(parts)


def _hover(frame: Frame, series: Sequence[Series], percent: bool) -> str:
    """Return the points as JSON in a script tag. The page's script shows those at the mouse pointer."""
    lines = []
    for each in series:
        kept = thin(each.smooth)
        values = zip(each.steps[kept], frame.x(each.steps[kept]), each.smooth[kept], strict=True)
        points = [[int(step), round(float(x), 1), number(float(value), percent)] for step, x, value in values]
        lines.append({"label": each.label, "color": each.color, "points": points})
    text = json.dumps(lines, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _figure(title: str, hint: str, legend: Sequence[tuple[str, str, str]], body: str, data: str) -> str:
    entries = "".join(
        f'<span><i class="{swatch}"></i>{escape(label)}{f" <b>{escape(value)}</b>" if value else ""}</span>'
        for swatch, label, value in legend
    )
    about = f"<small>{escape(hint)}</small>" if hint else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{about}</figcaption><div class="legend">{entries}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>{data}</figure>'
    )
