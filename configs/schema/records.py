"""Sections of a run for evaluation, checkpoints, logs and the closing comparison."""

from dataclasses import dataclass

from specjax.options import DraftLength, NonNegative, Options, Positive


@dataclass(frozen=True)
class EvalConfig(Options):
    """Evaluation on held-out prompts during training, with the rollout's sampling distribution.

    Attributes:
        every:   Steps between evaluations; 0: no evaluation.
        prompts: Number of held-out prompts; the first ones are used.
        samples: Completions per prompt.
    """

    every: NonNegative = 0
    prompts: Positive = 64
    samples: Positive = 1


@dataclass(frozen=True)
class CheckpointConfig(Options):
    """Checkpoints to resume from, saved before RL, every n-th step and at the end.

    Attributes:
        every: Steps between checkpoints; 0: none are saved.
        keep:  Number of newest checkpoints to keep.
        best:  Also keep the checkpoint at which this logged metric was highest. None: newest only.
    """

    every: NonNegative = 50
    keep: Positive = 2
    best: str | None = None


@dataclass(frozen=True)
class LogConfig(Options):
    """Records of a run besides its metrics.

    Attributes:
        samples:       Completions written to samples.jsonl at the first, last and every evaluated step; 0: none.
        wandb_project: Weights & Biases project that also gets the metrics. None: local files only.
    """

    samples: NonNegative = 4
    wandb_project: str | None = None


@dataclass(frozen=True)
class SpeedupConfig(Options):
    """Closing comparison, after the last step: generation with and without drafting, each at its best.

    Attributes:
        slots:         Numbers of sequences decoded together per data shard to try. Empty: no comparison.
        draft_lengths: Draft lengths to try.
        prompts:       Held-out prompts per timing over all data shards, with rollout.group_size completions each. Each
                       timing takes the next prompts.
        repeats:       Timings of the best settings with and of those without drafting, in turns.
    """

    slots: tuple[Positive, ...] = ()
    draft_lengths: tuple[DraftLength, ...] = (1, 2, 3, 4)
    prompts: Positive = 16
    repeats: Positive = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 in self.draft_lengths:
            raise ValueError(f"draft_lengths = {self.draft_lengths}: each must be at least 1")
        if self.slots and not self.draft_lengths:
            raise ValueError("draft_lengths = (): must have at least one draft length, unless slots is empty")
