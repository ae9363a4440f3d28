import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs.tiny import config as tiny
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer, token_texts
from launch.run import logs
from launch.run.logs import SampleLog
from specjax.types import Ending, Prompts, Reward, Rollout, Writer
from tests.launch.checkpoints import WORDS, write_tokenizer

PROMPTS = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.array([1, 0]))
ROLLOUT = Rollout(
    tokens=jnp.array([[0, 1, 2, 0], [1, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]),
    lengths=jnp.array([3, 2, 1, 4]),
    stopped=jnp.array([True, True, True, False]),
    writer=jnp.array([[1, 2, 4, 0], [1, 3, 0, 0], [1, 0, 0, 0], [1, 2, 2, 3]], jnp.int8),
    reward=Reward(jnp.array([3.0, 2.0, jnp.nan, 4.0]), jnp.zeros(4)),
)
# Advantages of the tokens of each row; prompts have none.
IN_COMPLETION = np.arange(5)[None] >= np.array([2, 3, 1, 1])[:, None]
BATCH = SimpleNamespace(
    completion=IN_COMPLETION, advantage=np.where(IN_COMPLETION, np.array([[1.5], [0], [-1], [2]]), 0)
)
SAVES = replace(tiny.checkpoint, every=6)


def log_in(directory: Path, count: int, resume_step: int | None = None, samples_every: int = 0) -> SampleLog:
    config = replace(
        tiny,
        steps=9,
        eval=replace(tiny.eval, every=4),
        checkpoint=SAVES,
        log=replace(tiny.log, samples=count, samples_every=samples_every),
    )
    problems = [Problem(prompt="a+a=", answer="0"), Problem(prompt="b+b=", answer="1")]
    experiment: Any = SimpleNamespace(
        config=config,
        tokenizer=CharacterTokenizer("ab"),
        problems=SimpleNamespace(train=problems),
    )
    return SampleLog(directory, experiment, resume_step)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def test_completions_of_different_prompts_with_who_wrote_them(tmp_path: Path):
    log_in(tmp_path, 3).write(4, PROMPTS, replace(ROLLOUT, batch=BATCH))
    log_in(tmp_path, 1, resume_step=4).write(8, PROMPTS, ROLLOUT)
    # Lines after the restored step are dropped. Values that a rollout does not return are null.
    log_in(tmp_path, 1, resume_step=4).write(5, PROMPTS, Rollout(ROLLOUT.tokens, ROLLOUT.lengths))
    line, untold = lines(tmp_path)
    assert (line["step"], line["budget"], line["lengths"], untold["step"]) == (4, 4, [3, 2, 1, 4], 5)
    first, second, third = line["completions"]
    pieces = [["a", Writer.POLICY], ["b", Writer.DRAFT], ["", Writer.BONUS]]
    assert first == {
        **{"prompt": "b+b=", "answer": "1", "extracted": None, "reward": 3.0, "advantage": 1.5},
        **{"stopped": True, "pieces": pieces},
    }
    assert (second["prompt"], second["reward"], third["pieces"]) == ("a+a=", None, [["b", 1], ["", 3]])
    (completion,) = untold["completions"]
    assert completion["stopped"] is completion["reward"] is None and completion["pieces"][0] == ["a", None]


def test_the_answer_of_a_scorer_of_ones_own_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "final_answers", lambda *_: lambda ids, problem: np.int64(len(ids) - 1))
    log_in(tmp_path, 3).write(4, PROMPTS, ROLLOUT)
    (line,) = lines(tmp_path)
    assert [completion["extracted"] for completion in line["completions"]] == ["2", None, "1"]
    monkeypatch.setattr(logs, "final_answers", pytest.fail)  # a run without samples does not load it
    log_in(tmp_path, 0)


def test_a_sample_with_an_environment_has_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Texts hold all special tokens. What was observed is not scored."""
    monkeypatch.setattr(logs, "final_answers", lambda *_: lambda ids, problem: ids)
    answered = replace(
        ROLLOUT,
        sampled=jnp.array([[True, False, True, False], *[[True] * 4] * 3]),
        ending=jnp.array([Ending.TIMED_OUT, Ending.TURNS, Ending.STOP, Ending.LENGTH], jnp.int8),
        turns=jnp.array([2, 1, 1, 0]),
        returns=jnp.array([jnp.nan, 0.0, 0.5, 0.0]),
    )
    log_in(tmp_path, 2).write(4, PROMPTS, answered)
    (line,) = lines(tmp_path)
    late, one = line["completions"]
    assert (late["ending"], late["turns"], late["environment_reward"]) == ("timed_out", 2, None)
    assert late["parts"] == [["sampled", "a"], ["observed", "b"], ["sampled", ""]] and late["extracted"] == "[0, 2]"
    assert (one["ending"], one["turns"], one["environment_reward"]) == ("stop", 1, 0.5)
    assert one["stopped"] is True and [kind for kind, _ in one["parts"]] == ["sampled"]


def test_the_prompts_are_read_on_the_host(tmp_path: Path):
    """Those of an asynchronous step are on devices where the next rollout is under way."""

    class Elsewhere:
        def __array__(self, *_: Any) -> np.ndarray:
            return np.array([1, 0])

    prompts = replace(PROMPTS)
    object.__setattr__(prompts, "id", Elsewhere())
    log_in(tmp_path, 1).write(4, prompts, ROLLOUT)
    assert lines(tmp_path)[0]["completions"][0]["prompt"] == "b+b="


def test_row_57_the_first_step_evaluations_saves_and_the_last_have_samples(tmp_path: Path):
    assert [step for step in range(1, 10) if log_in(tmp_path, 1).due(step, step == 7)] == [1, 4, 6, 7, 8]
    assert not any(log_in(tmp_path, 0).due(step, True) for step in range(1, 10))


def test_row_97_every_nth_step_has_samples(tmp_path: Path):
    every = log_in(tmp_path, 1, samples_every=3)
    assert [step for step in range(1, 10) if every.due(step, False)] == [1, 3, 4, 6, 8, 9]


def test_a_character_of_several_tokens_belongs_to_the_last():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("né€🙂"), 0xE2, 0x41, 256, 0x42, 0xF0, 0x9F]
    texts = token_texts(tokenizer, ids)
    assert texts[:10] == ["n", "", "é", "", "", "€", "", "", "", "🙂"]
    assert texts[10:] == ["", "\ufffdA", "", "B", "", "\ufffd"]


def byte_pairs(tmp_path: Path) -> Tokenizer:
    """Return a byte-level tokenizer, like Qwen's and Llama's, in which ids are parts of characters."""
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path, WORDS)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the sum of é and € is 🙂 "] * 3, vocab_size=280, special_tokens=["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("make", [byte_pairs, lambda _: ByteTokenizer()])
def test_the_texts_of_tokens_are_the_text(tmp_path: Path, make: Any):
    tokenizer, rng = make(tmp_path), np.random.default_rng(0)
    for length in (0, 1, 2, 5, 40):
        ids = rng.integers(tokenizer.vocab_size + 1, size=length).tolist()
        texts = token_texts(tokenizer, ids)
        assert len(texts) == length and "".join(texts) == tokenizer.decode(ids)
