"""The options of launch.distill."""

from dataclasses import dataclass
from typing import Literal

from launch.cli.paths import check_writable
from launch.distillation.export import check_verifier
from models.hf.eagle3_dialects import Dialect
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class DistillArgs:
    """Options of launch.distill alone; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:      the directory of a run, which has the policy; None takes that of model.path.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        start:           the draft to begin with: as the recipe starts it, or that of `checkpoint`.
        dialect:         whose layout to write an EAGLE-3 head in as well; ours writes DIR/draft alone.
        verifier:        the policy's name, as the serving engine knows it, for speculators' file to state; None states
                         the directory that the policy was read from.
        responses:       a JSONL file of answers to learn from, with the fields `prompt` and `response`; None generates.
        save_responses:  a file to write the generated answers to, which --responses reads.
        temperatures:    to measure acceptance at, beside the run's own.
        repeats:         timings of a step's rollout with the draft and without.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    start: Literal["recipe", "checkpoint"] = "recipe"
    dialect: Literal["ours", "specforge", "speculators"] = "ours"
    verifier: str | None = None
    responses: str | None = None
    save_responses: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    repeats: int = 10

    def __post_init__(self) -> None:
        if not all(0 <= temperature < float("inf") for temperature in self.temperatures):
            raise ValueError(f"temperatures = {self.temperatures}: each must be at least 0 and finite")
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: must be at least 1")
        if self.responses is not None and self.save_responses is not None:
            raise ValueError(f"save_responses = {self.save_responses}: must be none with responses, for none are made")
        if self.start == "checkpoint" and self.checkpoint is None:
            raise ValueError("start = checkpoint: must be recipe without checkpoint")
        check_verifier(self.verifier, self.dialect)
        check_writable("save_responses", self.save_responses)

    @property
    def public_dialect(self) -> Dialect | None:
        """The dialect to write in as well, None for ours alone."""
        return None if self.dialect == "ours" else self.dialect
