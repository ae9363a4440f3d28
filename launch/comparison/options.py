"""The options of launch.compare."""

from dataclasses import dataclass

from launch.cli.paths import check_writable
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Options of launch.compare alone; --steps is how many steps each variant is timed for.

    Attributes:
        draft_lengths:   Draft lengths to compare and to choose among, besides 0.
        checkpoint:      Directory of a run. None: start as the recipe does; distil a random draft.
        checkpoint_step: Its checkpoint: newest, best or a step.
        json:            File for the results.
        train_steps:     Train with and without drafting for so many steps; 0: do not.
        plots:           Directory for the reward curves; needs matplotlib.
    """

    draft_lengths: tuple[int, ...] = (0, 3, 5, 7)
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    json: str | None = None
    train_steps: int = 0
    plots: str | None = None

    def __post_init__(self) -> None:
        if min(self.draft_lengths, default=0) < 0 or not any(self.draft_lengths):
            raise ValueError(f"draft_lengths = {self.draft_lengths}: each must be at least 0, and one more than that")
        check_writable("json", self.json)
        if self.train_steps < 0:
            raise ValueError(f"train_steps = {self.train_steps}: must be at least 0")
        if self.plots is not None and not self.train_steps:
            raise ValueError(f"plots = {self.plots}: must be none without train_steps, of which the curves are")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths to choose among, ascending, 0 first."""
        return tuple(sorted({0, *self.draft_lengths}))
