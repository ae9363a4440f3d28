"""Cost of a distillation, counted over all processes that took part in it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launch.cli.compilation import CompileClock
from launch.cli.phase import Phase
from specjax.types import PyTree


@dataclass(frozen=True)
class DistillationCost:
    """Wall time of a distillation and the work done in it, over all processes that took part.

    Attributes:
        generation_s:   seconds of generating answers, including compiling.
        training_s:     seconds of training, including compiling.
        compile_s:      seconds of both spent compiling or reading the compile cache.
        answers:        number of answers.
        answer_tokens:  tokens of all answers.
        steps:          training steps.
        trained_tokens: answer tokens trained on, counted once per use.
    """

    generation_s: float
    training_s: float
    compile_s: float
    answers: int
    answer_tokens: int
    steps: int
    trained_tokens: int


@dataclass
class Work:
    """Seconds, of which some compiled, and tokens of a phase. Saved with its state: they count in all processes."""

    seconds: float = 0.0
    compile_s: float = 0.0
    tokens: int = 0

    @classmethod
    def restore(cls, phase: Phase) -> "Work":
        """Return the work that earlier processes saved as part "work"."""
        saved = phase.restore("work")
        return cls() if saved is None else cls(**{name: value.item() for name, value in saved.items()})

    @contextlib.contextmanager
    def timed(self, clock: CompileClock) -> Iterator[None]:
        """Add the seconds of the block."""
        clock.lap()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            self.compile_s += clock.lap()

    @property
    def state(self) -> PyTree:
        """Return what a phase saves."""
        return {name: np.array(value) for name, value in vars(self).items()}
