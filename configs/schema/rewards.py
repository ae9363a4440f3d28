"""Rewards: one scorer, or several with weights."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from specjax.options import NonNegative, Options, Positive, above, at_least, at_most, show

TRACED, ENVIRONMENT, NO_REWARD = "exact_traced", "environment", "none"
# Scorers within the program, which read no text.
ON_DEVICE = TRACED, ENVIRONMENT, NO_REWARD


@dataclass(frozen=True)
class LengthConfig(Options):
    """Options of the scorer `length`, which penalises short and long completions.

    The length counts the stop token. The reward is 0 from `least` to `most` tokens. Outside it falls linearly to -1 at
    a distance of `slack` tokens, and stays there. With `least` = 0 it is DAPO's penalty of overlong completions (arXiv
    2503.14476). With `least` = `most` it is a target length.

    Attributes:
        least: Shortest length without a penalty, in tokens.
        most:  Longest length without a penalty, in tokens. The scorer length needs it.
        slack: Tokens beyond these limits over which the reward falls to -1.
    """

    least: NonNegative = 0
    most: NonNegative | None = None
    slack: Positive = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.least > self.most:
            raise ValueError(f"least = {self.least}: must be at most most = {self.most}")


@dataclass(frozen=True)
class RewardConfig(Options):
    """Reward of a completion: the weighted sum of one or more scorers.

    A completion has no reward if a scorer raises, times out or returns no finite number.

    Attributes:
        scorer:       Main scorer; a completion is correct above 0.5. exact: text after the last # equals the answer;
                      math: math-verify; regex: see pattern; format: see format; exact_traced: exact on the device,
                      without other scorers; environment: only what the environment gives, which is added to every
                      scorer's reward; none: no reward and no answers, with a teacher; or package.module:name,
                      (completion, answer or problem) -> number.
        also:         Scorers to add to the main one: those above, or length. Each is logged as reward/NAME.
        weights:      Weight of each scorer, main first. Empty: all 1.
        pattern:      Regular expression of the scorer regex. The group of its last match must equal the answer; without
                      a group it only has to match.
        format:       Regular expression of the scorer format. It must match the whole completion; dots match newlines.
        length:       Options of the scorer length.
        thinking:     Texts that open and close thinking, as <think> </think>. Only what follows is scored.
        keep_special_tokens: Score with special tokens (<think>).
        workers:      Number of scorer processes.
        time_limit_s: Seconds for all scorers of one completion. After that it has no reward.
        code:         Hash of the code of your own scorers and environment. Runs set it, and say if they go on with
                      other code.
    """

    scorer: str = "exact"
    also: tuple[str, ...] = ()
    weights: tuple[Annotated[float, at_least(-1e6), at_most(1e6)], ...] = ()
    pattern: str | None = None
    format: str = r"\s*<think>.+</think>.*\S.*"
    length: LengthConfig = field(default_factory=LengthConfig)
    thinking: tuple[str, ...] = ()
    keep_special_tokens: bool = False
    workers: Annotated[int, at_least(1), at_most(1024)] = 2
    time_limit_s: Annotated[float, above(0), at_most(86_400)] = 5.0
    code: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer == "length":
            raise ValueError("scorer = length: cannot tell if an answer is correct; length is allowed only in also")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"also = {self.also}: must name each scorer once, without scorer = {self.scorer}")
        for name in ON_DEVICE:
            if name in self.names and (self.also or self.weights):
                raise ValueError(f"also = {self.also}, weights = {self.weights}: must be empty with {name}")
        if self.weights and len(self.weights) != len(self.names):
            raise ValueError(f"weights = {self.weights}: must be {len(self.names)}, for {', '.join(self.names)}")
        if ("regex" in self.names) != (self.pattern is not None):
            raise ValueError(f"pattern = {self.pattern}: must be set with the scorer regex, otherwise None")
        if "length" in self.names and self.length.most is None:
            raise ValueError("length.most = None: must be a number of tokens with the scorer length")
        if self.thinking:
            self._check_thinking()
        for name in ("pattern", "format"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"{name} = {getattr(self, name)}: not a regular expression: {error}") from None

    def _check_thinking(self) -> None:
        """Raise ValueError unless `thinking` has two markers, and no scorer looks for what they cut."""
        thinking = f"thinking = {self.thinking}"
        if len({*self.thinking}) != 2 or len(self.thinking) != 2 or not all(map(str.strip, self.thinking)):
            raise ValueError(f"{thinking}: must be empty, or two different texts such as <think> </think>")
        if TRACED in self.names:
            raise ValueError(f"{thinking}: must be empty with {TRACED}, which compares token ids; exact reads answers")
        if fault := self.pattern_fault(self.thinking, thinking):
            raise ValueError(fault)

    def pattern_fault(self, cut: Iterable[str], option: str) -> str | None:
        """Return a message if the pattern has one of the texts that are cut before it is matched. option: cuts them."""
        # Only what stands for itself is text: no character classes and operators.
        pattern = (self.pattern or "").replace(r"\n", "\n")
        escapes = r"\\(\W)|\\.|\[\^?(?:\\.|[^\]\\])+\]|[.^$*+?|()]"
        literal = re.sub(escapes, lambda found: found.group(1) or "\0", pattern)
        found = next((text for text in cut if text in literal), None)
        return found and (
            f"pattern = {self.pattern}: must not have {show(found)}, which is cut with {option} before it is matched"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all scorers, the main one first."""
        return (self.scorer, *self.also)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names under which each scorer's reward is logged; () for a single scorer."""
        return tuple(name.replace(":", ".") for name in self.names) if self.also else ()

    def pattern_of(self, scorer: str) -> str | None:
        """Return the regular expression of the scorer with that name; None if it takes none."""
        return {"regex": self.pattern, "format": self.format}.get(scorer)
