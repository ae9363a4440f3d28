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


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("A candle warms the night.", True),
        ("Candle light!", True),
        ('"A candle warms the night."\n', True),
        ("  Who lit the candle?  ", True),
        ("The candle, worth 3.50 dollars, burns...", True),
        ("**A candle burns.**", True),
        ("He said: “A candle burns.”", True),
        (LONG.format("on"), True),
        (LONG.format("on and"), False),
        ("A candle burns. It is warm.", False),
        ("A candle burns!\nIt is warm", False),
        ("A candle\nburns.", False),
        ("A candle burns. It is", False),
        ("A candle burns", False),
        ("The candles burn.", False),
        ("A scandle burns.", False),
        ("A lamp burns.", False),
        ("A candle-lit night.", True),
        ("candle", False),
        (".", False),
        ("", False),
    ],
)
def test_one_short_sentence_that_holds_the_word_is_right(completion: str, right: bool) -> None:
    scorer = load_scorer(load_recipe("smollm2_sentences").reward.scorer)
    assert scorer.score(completion, "candle") == float(right)
    tokenizer = ByteTokenizer()
    assert one_sentence(tokenizer.decode([*tokenizer.encode(completion), 256]), "candle") == float(right)
