"""Faults between text and tokens: stop tokens, special tokens, messages and chat templates."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.data.problems import Problem
from launch.data.responses import load_answers, worked_solutions
from launch.data.tokenizers import Tokenizer, state_stop_tokens
from launch.rewards.reward_fn import traced_exact
from launch.setup.experiment import build_experiment
from launch.setup.problems import build_tokenizer
from specjax.types import Prompts, Rollout
from tests.launch.programs import SMALLEST
from tests.launch.tokenizer_files import change, write_word_tokenizer
from tests.refusals import refuses

EOS, END, BOT, BOX = 0, 1, 3, 7  # ids of words; the tokenizer's stop token is EOS, the model's are END and EOS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


def tokenizer_of(directory: Path | None, **options: Any) -> Tokenizer:
    """Return a run's tokenizer. options: of the recipe, with "__" for a dot."""
    config = RunConfig(name="x", steps=1)
    given = {"model.path": str(directory)} if directory is not None else {"data.tokenizer": "bytes"}
    return build_tokenizer(
        override(config, given | {name.replace("__", "."): value for name, value in options.items()})
    )


@pytest.mark.parametrize(
    ("given", "replaced", "stops"),
    [((), False, (EOS, END)), ((BOX,), False, (EOS, END, BOX)), ((END, BOX), True, (END, BOX)), ((EOS,), True, (EOS,))],
)
def test_row_33_stop_tokens_are_one_list(
    directory: Path, given: tuple[int, ...], replaced: bool, stops: tuple[int, ...]
) -> None:
    tokenizer = tokenizer_of(directory, rollout__stop_tokens=given, rollout__replace_stop_tokens=replaced)
    assert tokenizer.stop_tokens == stops
    assert tokenizer.decode([5, *stops, 6]) == "hello world"
    assert tokenizer.decode([5, END]) == ("hello" if END in stops else "hello <end>")
    answers = worked_solutions([Problem(prompt="hello", answer="", solution="it")], tokenizer, 9, vocab_size=12)
    assert answers.completions.tolist() == [8, stops[0]]
    (directory / "a.jsonl").write_text(json.dumps({"prompt": "hello", "response": "it"}))
    answers, _ = load_answers(directory / "a.jsonl", tokenizer, 9, 9, vocab_size=12)
    assert answers.completions.tolist() == [8, stops[0]]


def test_row_33_a_rollout_ends_at_all_of_them_and_any_of_them_ends_a_traced_answer() -> None:
    options = {"rollout.stop_tokens": (2,), "rollout.draft_length": 0, "draft.kind": "none"}
    experiment = build_experiment(override(SMALLEST, options), training=False)
    assert experiment.config.rollout.stop_tokens == experiment.tokenizer.stop_tokens == (14, 2)
    byte = tokenizer_of(None, rollout__stop_tokens=(258,))
    reward = traced_exact([Problem(prompt="", answer="7")], byte)
    endings = [byte.encode("1#7") + [token] for token in (256, 258, 257, 10)] + [byte.encode("1#7"), byte.encode("#7")]
    tokens = np.zeros((len(endings), 5), np.int32)
    for row, ending in zip(tokens, endings, strict=True):
        row[: len(ending)] = ending
    rollout = Rollout(jnp.array(tokens), jnp.array(list(map(len, endings))))
    prompts: Any = Prompts(tokens=None, lengths=None, id=jnp.zeros(len(endings), jnp.int32))
    assert reward(rollout, prompts).value.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("stops", "generation", "config"),
    [
        ((EOS, END), [END, EOS], EOS),
        ((EOS, END, BOX), [EOS, END, BOX], EOS),
        ((BOX,), [BOX], [BOX]),
        ((EOS,), [EOS], EOS),
    ],
)
def test_row_33_an_export_names_the_stop_tokens_of_its_run(
    directory: Path, stops: tuple[int, ...], generation: object, config: object
) -> None:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    change(directory / "generation_config.json", top_k=20)
    state_stop_tokens(directory, stops)
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": generation, "top_k": 20}
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == config


def test_row_33_a_model_without_an_end_token_needs_one(directory: Path) -> None:
    change(directory / "tokenizer_config.json", eos_token=None)
    (directory / "generation_config.json").unlink()
    with refuses(f"rollout.stop_tokens = ()...model.path = {directory}", ConfigError):
        tokenizer_of(directory)
    assert tokenizer_of(directory, rollout__stop_tokens=(BOT,)).stop_tokens == (BOT,)
    with refuses("rollout.replace_stop_tokens = True: ...stop_tokens"):
        tokenizer_of(directory, rollout__replace_stop_tokens=True)
