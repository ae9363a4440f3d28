"""Sections of a run for evaluation, checkpoints, logs and the closing comparison."""

from dataclasses import dataclass

from specjax.options import NonNegative, Options, Positive


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
        samples:       Completions of a step to write to samples.jsonl; 0: none.
        samples_every: Also write every n-th step, beside the first, the last, and steps evaluated or saved; 0: only
                       these.
        wandb_project: Weights & Biases project that also gets the metrics. None: local files only.
    """

    samples: NonNegative = 4
    samples_every: NonNegative = 10
    wandb_project: str | None = None


@dataclass(frozen=True)
class SpeedupConfig(Options):
    """Closing comparison, after the last step: steps of the trained networks with and without drafting, by stage.

    Attributes:
        steps: Steps of each kind to time, in turns. 0: no comparison.
    """

    steps: NonNegative = 0
