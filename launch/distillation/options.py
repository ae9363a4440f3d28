"""The options of launch.distill."""

from dataclasses import dataclass
from typing import Literal

from launch.cli.paths import check_checkpoint, check_writable
from launch.distillation.export import check_verifier
from models.hf.eagle3_dialects import Dialect
from specjax.checkpoint import Which
from specjax.options import Options
from specjax.sampling import Temperature


@dataclass(frozen=True, kw_only=True)
class DistillArgs(Options):
    """Options that only launch.distill has. Its --out is a new or empty directory to write into.

    Attributes:
        checkpoint:      Run directory whose policy generates the answers. None: the policy of model.path.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        start:           Draft to start from: the recipe's, or the one in `checkpoint`.
        dialect:         Also write an EAGLE-3 head in this layout; ours: only DIR/draft.
        verifier:        Policy name to write in a speculators config. None: the policy's directory.
        responses:       JSONL file of answers (prompt, response). None: generate them.
        save_responses:  File for the generated answers.
        temperatures:    Further temperatures at which acceptance is measured.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    start: Literal["recipe", "checkpoint"] = "recipe"
    dialect: Literal["ours", "specforge", "speculators"] = "ours"
    verifier: str | None = None
    responses: str | None = None
    save_responses: str | None = None
    temperatures: tuple[Temperature, ...] = (0.0, 0.6, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.responses is not None and self.save_responses is not None:
            raise ValueError(f"save_responses = {self.save_responses}: must not be set together with responses")
        if self.start == "checkpoint" and self.checkpoint is None:
            raise ValueError("start = checkpoint: needs checkpoint; must be recipe otherwise")
        check_verifier(self.verifier, self.dialect)
        check_writable("save_responses", self.save_responses)
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    @property
    def public_dialect(self) -> Dialect | None:
        """Return the additional layout to write; None: only ours."""
        return None if self.dialect == "ours" else self.dialect
