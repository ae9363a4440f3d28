"""The console that all programs print to."""

from rich.console import Console

# Names of files and texts of models may hold square brackets, and names between colons.
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
