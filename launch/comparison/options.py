"""The options of launch.compare."""

from dataclasses import dataclass, replace

from configs.schema import RolloutOptions
from launch.cli.paths import check_checkpoint, check_writable
from specjax.checkpoint import Which
from specjax.options import DraftLength, Options

# Draft lengths above 0 that are compared by default.
DEFAULT_DRAFT_LENGTHS = (3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class CompareArgs(Options):
    """Options that only launch.compare has. Each variant is timed for --steps steps.

    Attributes:
        draft_lengths:   Draft lengths to compare, and to choose from automatically. 0 is always included. Default: 0,
                         3, 5 and 7; with a block draft those up to its block size, or that if it is below 3.
        checkpoint:      Run directory to start from. None: start as the recipe does; a random draft is distilled first.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        automatic:       Also time automatic choice of the draft length. False: no rounds are measured, which saves a
                         program for each draft length.
        json:            File for the results.
    """

    draft_lengths: tuple[DraftLength, ...] | None = None
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    automatic: bool = True
    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_lengths is not None and not any(self.draft_lengths):
            raise ValueError(f"draft_lengths = {self.draft_lengths}: at least one must be above 0")
        check_writable("json", self.json)
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    def rollout(self, config: RolloutOptions, most: int | None) -> RolloutOptions:
        """Return the options of rollouts that choose among all draft lengths and end every sequence.

        most: most tokens that the draft can draft; None: any number. It limits only the default.
        """
        lengths = self.draft_lengths or DEFAULT_DRAFT_LENGTHS
        if self.draft_lengths is None and most is not None:
            lengths = [length for length in DEFAULT_DRAFT_LENGTHS if length <= most] or [most]
        return replace(config, draft_lengths=tuple(sorted({0, *lengths})), carry_over=None, max_age=None)
