"""The sections of a run that describe what it measures, saves and logs."""

from dataclasses import dataclass

from models.config import at_least_one


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts during training, with the rollout's sampling distribution.

    Attributes:
        every:   Steps between evaluations; 0: none.
        prompts: Number of held-out prompts, the first ones.
        samples: Completions per prompt.
    """

    every: int = 0
    prompts: int = 64
    samples: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "samples")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to resume from: before RL, every so many steps, and at the end.

    Attributes:
        every: Steps between checkpoints; 0: none are saved.
        keep:  Number of newest checkpoints to keep.
        best:  Also keep the checkpoint where this metric was highest: any name that the run logs.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "keep")


@dataclass(frozen=True)
class LogConfig:
    """Records of a run besides its metrics.

    Attributes:
        samples:       Completions kept in full at the first, last and every evaluated step; 0: none.
        wandb_project: Project of Weights & Biases to log to as well.
    """

    samples: int = 4
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: must be at least 0")


@dataclass(frozen=True)
class SpeedupConfig:
    """The closing comparison: held-out prompts generated with and without a draft, each at its best.

    Attributes:
        slots:         Sequences decoded together per shard, to try. Empty skips the comparison.
        draft_lengths: Draft lengths to try.
        prompts:       Prompts per turn over all shards, rollout.group_size completions each; every turn takes the next.
        repeats:       Timings of the best settings of each kind, side by side.
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
