"""Answers in completions. This module imports nothing heavy, because every scorer process loads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Return a completion's text up to the first stop string in it, without it."""
    return text[: min((text.index(stop) for stop in stop_strings if stop in text), default=len(text))]


class Completion(NamedTuple):
    """A completion as scorers get it.

    Attributes:
        text:   all of it, thinking included, without stop tokens and special tokens that are cut.
        answer: the part that is scored; None if thinking has not ended.
    """

    text: str
    answer: str | None


@dataclass(frozen=True)
class AnswerRule:
    """The one rule by which a completion's answer is found, for all scorers, majorities, samples and reports.

    Attributes:
        thinking:     texts that open and close thinking; () if models do not think.
        stop_strings: texts that end a completion, or a turn.
        turns:        whether completions may have several turns. Stop strings within them are kept.
    """

    thinking: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    turns: bool = False

    def answer_in(self, text: str, opened: bool = False) -> str | None:
        """Return the text after the last end of thinking and before the stop string that ends it.

        It is None if thinking does not end: it is opened after that, or by the prompt, and not closed.

        text:   a completion with the markers of thinking.
        opened: the prompt opens thinking, and does not close it.
        """
        if self.turns:
            # The token that completes a stop string may end with space.
            ended = text.rstrip()
            found = next(filter(ended.endswith, self.stop_strings), None)
            text = text if found is None else ended.removesuffix(found)
        else:
            text = before_stop(text, self.stop_strings)
        if not self.thinking:
            return text
        opening, closing = self.thinking
        _, closed, answer = text.rpartition(closing)
        if opening in answer or (opened and not closed):
            return None
        return answer.lstrip() if closed else answer

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt, as the model is asked, leaves it within thinking."""
        opening, closing = map(str.strip, self.thinking or ("", ""))
        return prompt.rfind(opening) > prompt.rfind(closing) if opening else False
