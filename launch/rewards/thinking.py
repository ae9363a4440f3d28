"""Detect models that think by their chat template, and scorers that score the thinking."""

from collections.abc import Sequence

from configs.schema import RunConfig
from configs.schema.rewards import TRACED
from launch.data.problems import Problem
from launch.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from launch.rewards.reader import prompt_tail

# Markers of thinking in chat templates of public models.
KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("◁think▷", "◁/think▷"),
)


def thinking_of(tokenizer: Tokenizer, problem: Problem) -> tuple[str, str] | None:
    """Return the markers between which a model thinks by its chat template; None if it does not.

    A prompt that ends with thinking that is closed has turned it off.
    """
    template = tokenizer.template if isinstance(tokenizer, HuggingFaceTokenizer) else None
    # A template may put the marker together from parts, but has its first one in one piece.
    found = next((markers for markers in KNOWN if template and markers[0].partition("|>")[0] in template), None)
    if found is not None and prompt_tail(tokenizer, problem).rstrip().endswith(found[1]):
        return None
    return found


def describe_thinking(config: RunConfig, tokenizer: Tokenizer, problems: Sequence[Problem]) -> str | None:
    """Return a warning if the chat template has the model think, and its thinking is scored; else None."""
    found, cut = thinking_of(tokenizer, problems[0]), config.reward.thinking
    if found is None or found == cut:
        return None
    scorer = "--reward.scorer exact " * (config.reward.scorer == TRACED)
    return (
        f"reward.thinking = {cut}: the chat template has the model think between {' and '.join(found)}, and an answer "
        f"that is named there is scored; {scorer}--reward.thinking '{found[0]}' '{found[1]}' leaves it out"
    )
