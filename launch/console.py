"""A run as a person follows it: a line a step, and a table of stage times after each probe."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table

HEADER = "  step   reward  accuracy  acceptance length  tokens/s  s/step"
HEADER_EVERY = 20
STAGES = ("data", "prepare", "generation", "logprob", "train", "step")
STAGES_TITLE = "  seconds of each stage; generation's tokens/s, and its speed-up over autoregressive"

Values = Mapping[str, float | None]


class StepPrinter:
    """Called with a step and its metrics, prints them; anywhere, a terminal or not."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._lines = 0

    def __call__(self, step: int, values: Values) -> None:
        if self._lines % HEADER_EVERY == 0:
            self._console.print(HEADER, style="bold")
        self._lines += 1
        self._console.print(_line(step, values))
        if values["time/generation"] is not None:
            self._console.print(_stages(values))


def _line(step: int, values: Values) -> str:
    tokens, seconds = values["rollout/tokens"], values["time/step"]
    # Of the whole step, which every step measures; the table has that of generation alone.
    speed = tokens / seconds if tokens is not None and seconds else None
    line = (
        f"{step:6d}  {_show(values['reward/mean'], '.3f'):>7}  {_show(values['reward/accuracy'], '.1%'):>8}"
        f"  {_show(values['rollout/acceptance_length'], '.2f'):>17}  {_show(speed, '.0f'):>8}"
        f"  {_show(seconds, '.2f'):>6}"
    )
    if values["eval/accuracy"] is not None:
        line += f"  held out {values['eval/accuracy']:.1%}"
    if values["reward/failed"]:
        line += f"  {values['reward/failed']:.0f} not scored"
    return line


def _stages(values: Values) -> Table:
    columns = (Column(name, justify="right", no_wrap=True) for name in (*STAGES, "tokens/s", "speed-up"))
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=STAGES_TITLE, title_justify="left")
    table.add_row(
        *(_show(values[f"time/{stage}"], ".3f") for stage in STAGES),
        _show(values["perf/generation_tokens_per_s"], ".0f"),
        _show(values["perf/speedup_vs_autoregressive"], ".2f"),
    )
    return table


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
