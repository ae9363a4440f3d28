"""Stop strings of models, recipes and the command line."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from configs.from_json import from_json
from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.data.answer_files import load_answers
from launch.data.problems import Problem
from launch.data.responses import worked_solutions
from launch.data.tokenizer_files import state_stops
from launch.errors import ConfigError
from launch.evaluation.sampler import with_defaults
from launch.rewards.reward_fn import traced_exact
from launch.setup.experiment import build_experiment
from specjax.rewards import drawn
from specjax.rollout.plan import RolloutConfig
from specjax.types import Rollout
from tests.faults.test_tokens import BOX, END, EOS, tokenizer_of
from tests.launch.programs import SMALLEST
from tests.launch.tokenizer_files import change, write_word_tokenizer
from tests.refusals import refuses


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


def test_row_75_stop_strings_are_one_list_everywhere(directory: Path, tmp_path: Path) -> None:
    """Those of the model and of the recipe. A text that is a token which decoding cuts is a stop token."""
    generation = directory / "generation_config.json"
    change(generation, stop_strings=["o w", "<user>"])
    tokenizer = tokenizer_of(directory, rollout__stop_strings=("x it", "o w"))
    assert tokenizer.stop_strings == ("o w", "x it") and tokenizer.stop_tokens == (EOS, END, 2)
    replaced = tokenizer_of(directory, rollout__stop_tokens=(EOS,), rollout__replace_stop_tokens=True)
    assert (replaced.stop_strings, replaced.stop_tokens) == ((), (EOS,))
    # Solutions and answers end with them, without a stop token.
    solved = Problem(prompt="hello", answer="", solution="hello world")
    assert worked_solutions([solved], tokenizer, 9, vocab_size=12).completions.tolist() == [5, 6]
    change(generation, stop_strings=["o w" * 500])
    with refuses("rollout.stop_strings = ...at most 128 bytes...; rollout.replace_stop_tokens = True...", ConfigError):
        tokenizer_of(directory)
    with refuses("rollout.stop_strings = ('o w', 'x it'): ...problem 0 before 'it'", ConfigError):
        worked_solutions([replace(solved, solution="hello world it")], tokenizer, 9, vocab_size=12)
    records = [{"prompt": "hello", "response": text} for text in ("box it ?", "box world")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    answers, notes = load_answers(tmp_path / "a.jsonl", tokenizer, 9, 9, vocab_size=12)
    assert answers.completions.tolist() == [BOX, 8, BOX, 6, EOS] and notes[0].startswith("1 of 2 responses cut")
    # The run records them as text, and its files have them.
    options = {"rollout.draft_length": 0, "draft.kind": "none", "rollout.stop_strings": ("=1", "12")}
    experiment = build_experiment(override(SMALLEST, options), training=False)
    assert experiment.config.rollout.stop_automaton is not None
    recorded = from_json(RunConfig, json.loads(json.dumps(asdict(experiment.config))))
    assert recorded.rollout.stop_strings == ("=1", "12")
    for strings in ("o w", "x it"), ("?",), ():
        (directory / "config.json").write_text("{}")
        state_stops(directory, (EOS, END), strings)
        assert json.loads(generation.read_text()).get("stop_strings", []) == [*strings]
        assert tokenizer_of(directory).stop_strings == strings


@pytest.mark.parametrize("listed", ["", [""], [1], 3, {"a": 1}])
def test_row_75_stop_strings_of_a_model_must_be_texts(directory: Path, listed: object) -> None:
    change(directory / "generation_config.json", stop_strings=listed)
    with refuses(f"model.path = {directory}: stop_strings = ...in generation_config.json", ConfigError):
        tokenizer_of(directory)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello  world", "'hello  world': no tokens"),
        ("<eos> it", "'<eos> it': <eos> is cut"),
        ("a\nb", "'a\\nb': no tokens"),
        ("", "('',): must be"),
    ],
)
def test_row_75_stop_strings_that_no_completion_holds_are_refused(directory: Path, text: str, named: str) -> None:
    with refuses(f"rollout.stop_strings = {named}", ValueError):
        tokenizer_of(directory, rollout__stop_strings=(text,))


def test_row_75_the_option_takes_texts_as_they_are() -> None:
    config = parse_run(["tiny", "--rollout.stop-strings", "a, b", "\n\nQuestion:", "1,2"], "prog", "Do.")
    assert config.rollout.stop_strings == ("a, b", "\n\nQuestion:", "1,2")
    with refuses("rollout.stop_strings = ('a', 'a'): ...once", ConfigError):
        parse_run(["tiny", "--rollout.stop-strings", "a", "a"], "prog", "Do.")


def test_row_75_a_traced_answer_and_a_rollout_of_ones_own() -> None:
    tokenizer = tokenizer_of(None, rollout__stop_strings=("</a>",))
    with refuses("reward.scorer = exact_traced: ...must be exact", ConfigError):
        traced_exact([Problem(prompt="", answer="7")], tokenizer)
    config = RolloutConfig(stop_tokens=tokenizer.stop_tokens, stop_strings=tokenizer.stop_strings)
    texts = [[*b"7</a>"], [*b"7", 256], [*b"7</a"], []]
    tokens = jnp.array([text + [0] * (5 - len(text)) for text in texts])
    rollout = Rollout(tokens, jnp.array(list(map(len, texts))))
    whole = with_defaults(rollout, config)
    assert whole.stopped.tolist() == [True, True, False, False]
    # Padding is not drawn.
    np.testing.assert_array_equal(whole.written, rollout.lengths)
    np.testing.assert_array_equal(drawn(whole)[1], rollout.lengths)
