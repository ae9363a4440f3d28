"""The sections of a run that describe what it measures, saves and logs."""

from dataclasses import dataclass

from models.config import at_least_one


@dataclass(frozen=True)
class EvalConfig:
    """In-training validation on held-out prompts, by the rollout's own law.

    Attributes:
        every:   steps from one to the next; 0 never.
        prompts: how many, the first of those held out.
        samples: completions of each.
    """

    every: int = 0
    prompts: int = 64
    samples: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "samples")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves that a run can be resumed from: behind warm-up and distillation, on the way, and at its end.

    Attributes:
        every: steps from one to the next; 0 never saves.
        keep:  how many stay, the newest.
        best:  eval/accuracy, reward/mean, reward/accuracy, a part of the reward, or rollout/acceptance_length: of the
               saves, the one where it was highest stays too. None keeps the newest alone.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "keep")


@dataclass(frozen=True)
class LogConfig:
    """What a run keeps beside its metrics.

    Attributes:
        samples:       completions kept in full, with the lengths of all, of the first step, those that are evaluated
                       and the last; 0 keeps none.
        wandb_project: log to this project of Weights & Biases too; None does not.
    """

    samples: int = 4
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: must be at least 0")


@dataclass(frozen=True)
class SpeedupConfig:
    """The closing comparison: held-out prompts generated at every slot count and draft length, each at its best.

    Attributes:
        slots:         sequences decoded at a time on each shard, to begin with; empty skips the comparison.
        draft_lengths: K of the speculative settings.
        prompts:       in a turn, over all shards, with rollout.group_size samples each, as in a step; every turn takes
                       the next of those held out.
        repeats:       timings of the best settings of each kind, side by side.
    """

    slots: tuple[int, ...] = ()
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    prompts: int = 16
    repeats: int = 5

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "repeats")
        for name in ("slots", "draft_lengths"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)}: each must be at least 1")
        if self.slots and not self.draft_lengths:
            raise ValueError("draft_lengths = (): must name one to compare with, or slots be empty")
