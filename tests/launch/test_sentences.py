"""The built-in task of short sentences: its problems and its scorer."""

import pytest

from launch.cli.recipes import load_recipe
from launch.data.sentences import HELD_OUT_TOPICS, HELD_OUT_WORDS, TOPICS, WORDS, one_sentence, problems
from launch.data.tokenizers import ByteTokenizer
from launch.rewards.scorers import load_scorer
from launch.setup.problems import build_problems


def test_held_out_problems_share_no_topic_and_no_word_with_the_training_problems() -> None:
    config = load_recipe("smollm2_sentences")
    found = build_problems(config)
    assert (found.train, found.held_out) == problems(config.seed) != problems(config.seed + 1)
    assert len({problem.prompt for problem in found.train}) == len(found.train) > 1000
    assert len({problem.prompt for problem in found.held_out}) == len(found.held_out) > 150
    for training, held_out in ((TOPICS, HELD_OUT_TOPICS), (WORDS, HELD_OUT_WORDS)):
        assert len({*training, *held_out}) == len(training) + len(held_out)
    for problem in (*found.train, *found.held_out):
        assert f'Use the word "{problem.answer}".' in problem.prompt


LONG = "The candle " + "and " * 22 + "{}."  # 24 words before the last


RIGHT = (
    *("A candle warms the night.", "Candle light!", '"A candle warms the night."\n', "  Who lit the candle?  "),
    *("The candle, worth 3.50 dollars, burns...", "**A candle burns.**", "He said: “A candle burns.”"),
    *(LONG.format("on"), "A candle-lit night."),
)
WRONG = (
    *(LONG.format("on and"), "A candle burns. It is warm.", "A candle burns!\nIt is warm", "A candle\nburns."),
    *("A candle burns. It is", "A candle burns", "The candles burn.", "A scandle burns.", "A lamp burns."),
    *("candle", ".", ""),
)


@pytest.mark.parametrize("completion", RIGHT + WRONG)
def test_one_short_sentence_that_holds_the_word_is_right(completion: str) -> None:
    right = completion in RIGHT
    scorer = load_scorer(load_recipe("smollm2_sentences").reward.scorer)
    assert scorer.score(completion, "candle") == float(right)
    tokenizer = ByteTokenizer()
    assert one_sentence(tokenizer.decode([*tokenizer.encode(completion), 256]), "candle") == float(right)
