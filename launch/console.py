"""The console that all programs print to."""

import importlib
from typing import Any

from rich.console import Console

from launch.errors import printable
from launch.jobs.silence import note_progress


class ProgressConsole(Console):
    """Console on which every printed object counts as progress of this process.

    Texts may come from data and models: what a terminal would obey becomes a space.

    Attributes:
        in_notebook: this process is a notebook's kernel. Lines are text there as well: rich would show a block of HTML
                     for each.
    """

    in_notebook = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.in_notebook, self.is_jupyter = self.is_jupyter, False

    @property
    def is_terminal(self) -> bool:
        """False in a notebook, which does not obey control codes, though its FORCE_COLOR asks for them."""
        return not self.in_notebook and super().is_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        note_progress()
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


class NotebookLine:
    """A line in the output of a notebook's cell. Each text that is printed to it replaces the one before."""

    def __init__(self) -> None:
        self._shown: Any = None

    def print(self, text: str) -> None:
        """Show the text, at the place of the first one."""
        data = {"text/plain": printable(text)}
        if self._shown is None:
            display = importlib.import_module("IPython.display").display
            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)


# File names and texts of models may hold rich's markup: square brackets, and emoji names between colons.
console = ProgressConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)
# For tables whose columns must not be cut where the terminal, or a file, is narrow.
wide_console = ProgressConsole(highlight=False, soft_wrap=True, markup=False, emoji=False, width=170)
