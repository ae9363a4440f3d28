"""The console that all programs print to."""

from rich.console import Console

# File names and texts of models may hold rich's markup: square brackets, and emoji names between colons.
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
# For tables whose columns must not be cut where the terminal, or a file, is narrow.
wide_console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=170)
