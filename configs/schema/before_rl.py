"""The sections of a run that describe what is trained before RL begins."""

from dataclasses import dataclass, field

from models.config import at_least_one
from specjax.train.optimizer import OptimizerConfig


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the problems' own solutions before RL, for a policy from scratch.

    Attributes:
        steps:      how many; 0 skips them.
        batch_size: problems in a step.
    """

    steps: int = 0
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-3))


@dataclass(frozen=True)
class DistillConfig:
    """Distillation of the draft from the policy's own answers: what launch.distill does, and launch.train before RL.

    The optimiser is `draft_optimizer`, whose rate falls to zero towards the last step.

    Attributes:
        steps:        how many; 0 skips them in launch.train, and in launch.distill goes four times over the answers.
        answers:      how many the policy generates, in rollouts of the run's own shape.
        chunks:       parts in which it does, with a part of the steps behind each: from the second on the draft drafts.
        batch_size:   answers in a step.
        microbatches: parts in which its gradient is accumulated.
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
