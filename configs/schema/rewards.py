"""What a completion is worth: one scorer, or several with weights."""

import math
import re
from dataclasses import dataclass, field

from models.config import at_least_one

TRACED = "exact_traced"


@dataclass(frozen=True)
class LengthConfig:
    """What the scorer `length` goes by: the tokens of a completion, its stop token included.

    0 from `least` to `most`, falling to -1 at `slack` tokens outside, and no further. With `least` at 0 it is DAPO's
    penalty for overlong completions (arXiv 2503.14476); where both are the same, a target.

    Attributes:
        least: tokens, at least.
        most:  tokens, at most; must be given where the scorer is asked for.
        slack: tokens over which the penalty grows.
    """

    least: int = 0
    most: int | None = None
    slack: int = 256

    def __post_init__(self) -> None:
        at_least_one(self, "slack")
        if self.most is not None and not 0 <= self.least <= self.most:
            raise ValueError(f"least = {self.least}, most = {self.most}: must be 0 <= least <= most")


@dataclass(frozen=True)
class RewardConfig:
    """How completions are scored: the weighted sum of what `scorer` and those of `also` say.

    A sample for which one of them raises, takes too long or returns no finite number is not scored.

    Attributes:
        scorer:       decides by itself what counts as correct (above 0.5): exact (what follows the last '#'), math
                      (math-verify), regex, format or package.module:function, on the host; or exact_traced, the first
                      inside the program and alone, which wants the stop token behind the answer.
        also:         more of them, length too; what each comes to is logged as reward/NAME.
        weights:      a number for each, that of `scorer` first; empty gives all of them 1.
        pattern:      of regex, a regular expression: the group of its last match must be the answer, or there must be a
                      match where it has no group.
        format:       of format, a regular expression that the whole completion must match; its dots match line ends.
        length:       of length.
        workers:      processes of host scorers.
        time_limit_s: for one sample and all its scorers; beyond it the sample counts as failed.
    """

    scorer: str = "exact"
    also: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    pattern: str | None = None
    format: str = r"\s*<think>.+</think>.*\S.*"
    length: LengthConfig = field(default_factory=LengthConfig)
    workers: int = 2
    time_limit_s: float = 5.0

    def __post_init__(self) -> None:
        at_least_one(self, "workers")
        if not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"time_limit_s = {self.time_limit_s}: must be above 0 and finite")
        if self.scorer == "length":
            raise ValueError("scorer = length: says of no answer that it is correct; must be one of also")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"also = {self.also}: must name each scorer once, and not {self.scorer} again")
        if TRACED in self.names and (self.also or self.weights):
            raise ValueError(f"also = {self.also}, weights = {self.weights}: must be empty with {TRACED}")
        if self.weights and len(self.weights) != len(self.names):
            raise ValueError(f"weights = {self.weights}: must be {len(self.names)}, of {', '.join(self.names)}")
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"weights = {self.weights}: must be finite")
        if ("regex" in self.names) != (self.pattern is not None):
            raise ValueError(f"pattern = {self.pattern}: must be given with the scorer regex, and with no other")
        if "length" in self.names and self.length.most is None:
            raise ValueError("length.most = None: must be a number of tokens with the scorer length")
        for name in ("pattern", "format"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"{name} = {getattr(self, name)}: no regular expression: {error}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The scorers, the one that decides what is correct first."""
        return (self.scorer, *self.also)

    @property
    def parts(self) -> tuple[str, ...]:
        """What the parts of a sum are logged as; none where there is but one."""
        return tuple(name.replace(":", ".") for name in self.names) if self.also else ()
