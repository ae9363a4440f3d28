"""The options of launch.compare."""

from dataclasses import dataclass, replace

from configs.schema import RolloutOptions
from launch.cli.paths import check_checkpoint, check_writable
from specjax.checkpoint import Which
from specjax.options import DraftLength, Options


@dataclass(frozen=True, kw_only=True)
class CompareArgs(Options):
    """Options that only launch.compare has. Each variant is timed for --steps steps.

    Attributes:
        draft_lengths:   Draft lengths to compare, and to choose from automatically. 0 is always included.
        checkpoint:      Run directory to start from. None: start as the recipe does; a random draft is distilled first.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        automatic:       Also time automatic choice of the draft length. False: no rounds are measured, which saves a
                         program for each draft length.
        json:            File for the results.
    """

    draft_lengths: tuple[DraftLength, ...] = (0, 3, 5, 7)
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    automatic: bool = True
    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.draft_lengths):
            raise ValueError(f"draft_lengths = {self.draft_lengths}: at least one must be above 0")
        check_writable("json", self.json)
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the draft lengths, ascending, starting with 0."""
        return tuple(sorted({0, *self.draft_lengths}))

    def rollout(self, config: RolloutOptions) -> RolloutOptions:
        """Return the options of rollouts that choose among all draft lengths and end every sequence."""
        return replace(config, draft_lengths=self.lengths, carry_over=None, max_age=None)
