"""The built-in task of writing facts as JSON: its problems and its scorers."""

import json

import pytest

from launch.cli.recipes import load_recipe
from launch.data.extraction import HELD_OUT, TRAINING, problems
from launch.rewards.scorers import load_scorer
from launch.setup.problems import build_problems


def test_held_out_problems_share_no_fact_and_no_sentence_with_the_training_problems() -> None:
    config = load_recipe("smollm2_extraction")
    found = build_problems(config)
    assert (found.train, found.held_out) == problems(config.seed) != problems(config.seed + 1)
    assert len({problem.prompt for problem in found.train}) == len(found.train) == 2000
    assert len({problem.prompt for problem in found.held_out}) == len(found.held_out) == 200
    for training, held_out in zip(vars(TRAINING).values(), vars(HELD_OUT).values(), strict=True):
        assert len({*training, *held_out}) == len(training) + len(held_out)
    for problem in (*found.train, *found.held_out):
        assert all(str(fact) in str(problem.prompt) for fact in json.loads(problem.answer).values())


ANSWER = '{"name": "Ana Ruiz", "age": 30, "job": "cook", "city": "Rome"}'
# Completions, and how many of the four keys and four values they are worth.
WORTH = {
    ANSWER: 8,
    f" {ANSWER}\n": 8,
    f"```json\n{ANSWER}\n```": 8,
    '{"city": "Rome", "age": "30",\n "job": "cook", "name": "Ana Ruiz"}': 8,
    ANSWER.replace("cook", "Cook").replace("city", "City"): 8,
    ANSWER.replace("cook", "baker"): 7,
    ANSWER.replace('"Rome"', '["Rome"]'): 7,
    ANSWER.replace("cook", "Rome").replace('"city": "Rome"', '"city": "cook"'): 6,
    ANSWER.replace(', "city": "Rome"', ""): 6,
    ANSWER.replace('"city"', '"town"'): 6,
    ANSWER.replace("}", ', "country": "Italy"}'): 8 * 4 / 5,
    ANSWER.replace("}", ', "city": "Paris"}'): 8 * 4 / 5,
    ANSWER.replace("}", ', "city": "Rome"}'): 8 * 4 / 5,
    f"Here it is: {ANSWER}": 0,
    f"[{ANSWER}]": 0,
    f"{ANSWER} {ANSWER}": 0,
    ANSWER.removesuffix("}"): 0,
    '[["name", "Ana Ruiz"], ["age", 30], ["job", "cook"], ["city", "Rome"]]': 0,
    "{}": 0,
    "[" * 100_000: 0,
    '{"name":' * 400 + "1" + "}" * 400: 1,
    "```json" + " " * 10_000 + "x": 0,
    "": 0,
}


@pytest.mark.parametrize("completion", WORTH, ids=range(len(WORTH)))
def test_a_completion_is_worth_the_keys_and_values_that_it_gets_right(completion: str) -> None:
    config = load_recipe("smollm2_extraction").reward
    right, facts = (load_scorer(name).score(completion, ANSWER) for name in config.names)
    assert (right, facts) == (float(WORTH[completion] == 8), WORTH[completion] / 8)
