"""Rewards: one scorer, or several with weights."""

import math
import re
from dataclasses import dataclass, field

from models.config import at_least_one

TRACED = "exact_traced"


@dataclass(frozen=True)
class LengthConfig:
    """The scorer `length`: rewards by the number of tokens, including the stop token.

    0 from `least` to `most`, falling to -1 at `slack` tokens outside, and no further. With `least` = 0 it is DAPO's
    penalty of overlong completions (arXiv 2503.14476); with `least` = `most`, a target.

    Attributes:
        least: Fewest tokens without a penalty.
        most:  Most tokens without a penalty; must be given with the scorer length.
        slack: Tokens over which the penalty grows to 1.
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
    """How completions are scored: the weighted sum of `scorer` and those of `also`.

    A completion for which a scorer raises, times out or returns no finite number has no reward.

    Attributes:
        scorer:       exact (the text after the last #), math (math-verify), regex, format, exact_traced (inside the
                      program, alone), or package.module:name. Above 0.5 is correct.
        also:         More scorers, also length; each is logged as reward/NAME.
        weights:      A weight for each, that of `scorer` first. Empty: all 1.
        pattern:      For regex: the group of its last match is the answer; without a group, it must match.
        format:       For format: regular expression that the whole completion must match; dots match newlines.
        length:       For length.
        workers:      Processes that score.
        time_limit_s: Seconds for all scorers of a completion; then it has no reward.
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
        """Return the names that the parts of a sum are logged by; none for a single scorer."""
        return tuple(name.replace(":", ".") for name in self.names) if self.also else ()
