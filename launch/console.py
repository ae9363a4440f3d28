"""The console that all programs print to."""

from typing import Any

from rich.console import Console

from launch.errors import printable
from launch.jobs.silence import note_progress


class ProgressConsole(Console):
    """Console on which every printed object counts as progress of this process.

    Texts may come from data and models: what a terminal would obey becomes a space.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        note_progress()
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


# File names and texts of models may hold rich's markup: square brackets, and emoji names between colons.
console = ProgressConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)
# For tables whose columns must not be cut where the terminal, or a file, is narrow.
wide_console = ProgressConsole(highlight=False, soft_wrap=True, markup=False, emoji=False, width=170)
