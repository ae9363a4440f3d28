"""The options of launch.diagnose."""

from dataclasses import dataclass

from launch.cli.paths import check_checkpoint, check_writable
from specjax.checkpoint import Which
from specjax.options import Options, Positive


@dataclass(frozen=True, kw_only=True)
class DiagnoseArgs(Options):
    """Options that only launch.diagnose has.

    Attributes:
        checkpoint:      Run directory to load from. None: the networks that the recipe starts from.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        prompts:         Number of held-out prompts to complete; more give smaller errors.
        json:            File for the results.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    prompts: Positive = 32
    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable("json", self.json)
        check_checkpoint(self.checkpoint, self.checkpoint_step)
