"""The options of launch.compare."""

from dataclasses import dataclass

from launch.cli.options import Numbers
from launch.cli.paths import check_writable
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Options of launch.compare alone; --steps is how many steps each variant is timed for.

    Attributes:
        draft_lengths:   to compare, and to choose among; 0, autoregressive, is always one of them.
        checkpoint:      the directory of a run, which has the policy and the draft; None begins as the recipe does, and
                         distils a draft that has random weights.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        json:            a file for everything that was measured.
        train_steps:     train the autoregressive variant and the automatic one for so many steps as well, and draw
                         their rewards; 0 does not.
        plots:           a directory for these curves; needs matplotlib.
    """

    draft_lengths: Numbers = Numbers((0, 3, 5, 7))
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    json: str | None = None
    train_steps: int = 0
    plots: str | None = None

    def __post_init__(self) -> None:
        if min(self.draft_lengths, default=0) < 0 or not any(self.draft_lengths):
            raise ValueError(
                f"draft_lengths = {tuple(self.draft_lengths)}: each must be at least 0, and one more than that"
            )
        check_writable("json", self.json)
        if self.train_steps < 0:
            raise ValueError(f"train_steps = {self.train_steps}: must be at least 0")
        if self.plots is not None and not self.train_steps:
            raise ValueError(f"plots = {self.plots}: must be none without train_steps, of which the curves are")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths to choose among, ascending, 0 first."""
        return tuple(sorted({0, *self.draft_lengths}))
