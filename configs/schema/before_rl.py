"""Sections of a run for training before RL: warm-up and distillation."""

from dataclasses import dataclass, field

from specjax.options import NonNegative, Options, Positive
from specjax.train.optimizer import OptimizerConfig


@dataclass(frozen=True)
class WarmupConfig(Options):
    """Supervised steps on worked solutions before RL, for a policy with random weights.

    Attributes:
        steps:      Number of steps; 0: no warm-up.
        batch_size: Problems per step.
        optimizer:  Optimiser of the warm-up.
    """

    steps: NonNegative = 0
    batch_size: Positive = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-3))


@dataclass(frozen=True)
class DistillConfig(Options):
    """Training the draft on the policy's own answers: in launch.distill, or before RL.

    The optimiser is `draft_optimizer`. Its learning rate falls to zero at the last step. Batches have rows of similar
    length and are padded to the buckets of `ladder`, or without one to a few lengths.

    Attributes:
        steps:        Number of steps. 0: no distillation before RL, and four passes over the answers in launch.distill.
        answers:      Number of answers that the policy generates.
        chunks:       Generate the answers in at most so many parts, and train after each. An untrained draft speeds up
                      generation from the second part on. 1: generate all, then train.
        batch_size:   Answers per step.
        microbatches: Microbatches per step; more save memory.
    """

    steps: NonNegative = 0
    answers: Positive = 4096
    chunks: Positive = 4
    batch_size: Positive = 32
    microbatches: Positive = 1
