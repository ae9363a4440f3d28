"""Completions of problems as scorers get them, read from token ids."""

from collections.abc import Sequence

from configs.schema import RunConfig
from launch.data.problems import Problem
from launch.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from launch.rewards.answers import AnswerRule, Completion

# Last tokens of a prompt that are decoded to see whether it opens thinking. Markers are shorter.
TAIL = 64


def answer_rule(config: RunConfig) -> AnswerRule:
    """Return the rule by which answers are found in a run's completions."""
    stop_strings, turns = tuple(config.rollout.stop_strings), bool(config.environment.names)
    return AnswerRule(config.reward.thinking, stop_strings, turns)


class AnswerReader:
    """Reads completions of `problems`: markers of thinking count also where `decode` cuts them as special tokens."""

    def __init__(self, rule: AnswerRule, tokenizer: Tokenizer, problems: Sequence[Problem]) -> None:
        self.rule, self.tokenizer, self.problems = rule, tokenizer, problems
        self._opened = dict[int, bool]()

    def read(self, ids: Sequence[int], problem: int) -> Completion:
        """Return the completion with these token ids. problem: index of the problem that it answers."""
        text = marked = self.tokenizer.decode(ids)
        if self.rule.thinking and isinstance(self.tokenizer, HuggingFaceTokenizer):
            marked = self.tokenizer.decode_keeping(ids, self.rule.thinking)
        return Completion(text, self.rule.answer_in(marked, self.opened(problem)))

    def opened(self, problem: int) -> bool:
        """Return whether the prompt of a problem, in the chat format, leaves the model within thinking."""
        if not self.rule.thinking:
            return False
        if problem not in self._opened:
            tail = prompt_tail(self.tokenizer, self.problems[problem])
            self._opened[problem] = self.rule.opened_by(tail)
        return self._opened[problem]


def prompt_tail(tokenizer: Tokenizer, problem: Problem) -> str:
    """Return the end of a prompt as the model is asked, with special tokens."""
    ids = tokenizer.chat(problem.prompt)[-TAIL:]
    return tokenizer.with_special_tokens(ids)
