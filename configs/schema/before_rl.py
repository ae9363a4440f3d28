"""The sections of a run that describe what is trained before RL begins."""

from dataclasses import dataclass, field

from models.config import at_least_one
from specjax.train.optimizer import OptimizerConfig


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on worked solutions before RL, for a policy with random weights.

    Attributes:
        steps:      Number of steps; 0 skips them.
        batch_size: Problems per step.
        optimizer:  Optimiser of these steps.
    """

    steps: int = 0
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-3))


@dataclass(frozen=True)
class DistillConfig:
    """Training the draft on the policy's own answers: in launch.distill, or before RL.

    The optimiser is `draft_optimizer`, with a rate that falls to zero at the last step.

    Attributes:
        steps:        Number of steps; 0: none before RL, four passes over the answers in launch.distill.
        answers:      Answers that the policy generates.
        chunks:       Generate and train in so many parts; from the second on the draft drafts.
        batch_size:   Answers per step.
        microbatches: Microbatches per step.
    """

    steps: int = 0
    answers: int = 4096
    chunks: int = 4
    batch_size: int = 32
    microbatches: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "answers", "chunks", "batch_size", "microbatches")
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}: must be at least 0")
