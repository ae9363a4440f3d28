"""Cost of a distillation, summed over all processes that worked on it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launch.phases.compile_clock import CompileClock
from launch.phases.long_phase import LongPhase
from specjax.types import PyTree


@dataclass(frozen=True)
class DistillationCost:
    """Wall time and amount of work of a distillation, summed over all processes that worked on it.

    Attributes:
        generation_s:   seconds of generating answers, including compilation.
        training_s:     seconds of training, including compilation.
        compile_s:      seconds of both that went into compiling or reading the compile cache.
        answers:        number of answers.
        answer_tokens:  number of tokens in all answers.
        steps:          number of training steps.
        trained_tokens: number of answer tokens trained on; a token counts each time it is used.
    """

    generation_s: float
    training_s: float
    compile_s: float
    answers: int
    answer_tokens: int
    steps: int
    trained_tokens: int


class Work:
    """Seconds (`compile_s` of them compiling) and tokens of a phase, summed over processes and saved with its state."""

    def __init__(self, phase: LongPhase | None = None) -> None:
        saved = None if phase is None else phase.restore("work")
        values = {"seconds": 0.0, "compile_s": 0.0, "tokens": 0} if saved is None else saved
        self.seconds, self.compile_s = float(values["seconds"]), float(values["compile_s"])
        self.tokens, self._clock = int(values["tokens"]), CompileClock()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds that the `with` block takes."""
        self._clock.lap()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            self.compile_s += self._clock.lap()

    @property
    def state(self) -> PyTree:
        """Return the values as arrays, for the phase to save."""
        return {name: np.array(getattr(self, name)) for name in ("seconds", "compile_s", "tokens")}
