"""The console that all programs print to."""

from rich.console import Console

# No markup: names of files and texts of models may hold square brackets.
console = Console(highlight=False, soft_wrap=True, markup=False)
