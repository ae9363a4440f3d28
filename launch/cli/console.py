"""The console that all programs print to."""

from rich.console import Console

# File names and texts of models may hold rich's markup: square brackets, and emoji names between colons.
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
