"""Sections of a run for evaluation, checkpoints, logs and the closing comparison."""

from dataclasses import dataclass

from models.config import at_least_one


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts during training, with the rollout's sampling distribution.

    Attributes:
        every:   Steps between evaluations; 0: no evaluation.
        prompts: Number of held-out prompts; the first ones are used.
        samples: Completions per prompt.
    """

    every: int = 0
    prompts: int = 64
    samples: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "samples")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to resume from, saved before RL, every n-th step and at the end.

    Attributes:
        every: Steps between checkpoints; 0: none are saved.
        keep:  Number of newest checkpoints to keep.
        best:  Also keep the checkpoint at which this logged metric was highest. None: newest only.
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
        samples:       Completions written to samples.jsonl at the first, last and every evaluated step; 0: none.
        wandb_project: Weights & Biases project that also gets the metrics. None: local files only.
    """

    samples: int = 4
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: must be at least 0")


@dataclass(frozen=True)
class SpeedupConfig:
    """Closing comparison, after the last step: generation with and without drafting, each at its best.

    Attributes:
        slots:         Numbers of sequences decoded together per data shard to try. Empty: no comparison.
        draft_lengths: Draft lengths to try.
        prompts:       Held-out prompts per timing over all data shards, with rollout.group_size completions each. Each
                       timing takes the next prompts.
        repeats:       Timings of the best settings with and of those without drafting, in turns.
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
            raise ValueError("draft_lengths = (): must have at least one draft length, unless slots is empty")
