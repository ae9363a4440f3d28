"""Row 30: launch.generate shows an answer while it is generated, generates it once, and prints why it ended."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from launch.cli.options import parse_run
from launch.data.batches import fixed_batches
from launch.data.problems import Problem
from launch.data.stop_strings import find_stop_strings
from launch.evaluation.one_prompt import answer_prompt
from launch.evaluation.sampler import Sampler
from launch.setup.experiment import Experiment, build_experiment
from tests.launch.programs import LEAST, argv

PROMPT, BUDGET = "12+3", 8


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    options = {"--rollout.draft-length": "2", "--rollout.verifier": "coupled", "--lora.rank": "1"}
    config = parse_run(argv("tiny", LEAST | options), "", "")
    rollout = replace(config.rollout, max_new_tokens=BUDGET, draft_lengths=(), phases=())
    return build_experiment(replace(config, rollout=rollout), training=False)


def whole_answer(experiment: Experiment) -> tuple[str, int, bool]:
    """Return text and length of the answer of one rollout, and whether a stop token ended it."""
    sampler = Sampler(experiment, experiment.networks.drafter, 1, step=0)
    (prompts,) = fixed_batches(experiment.encode_prompts([Problem(prompt=PROMPT, answer="")]), 1)
    rollout, _ = sampler.generate(experiment.networks.params, prompts)
    length = int(rollout.lengths[0])
    stopped = bool(np.asarray(rollout.stopped)[0])
    return experiment.tokenizer.decode(np.asarray(rollout.tokens)[0, :length].tolist()), length, stopped


def test_row_30_an_answer_is_streamed_with_the_tokens_of_a_rollout(experiment: Experiment) -> None:
    text, length, stopped = whole_answer(experiment)
    assert not stopped and length == BUDGET
    pieces = list[str]()
    summary = answer_prompt(experiment, experiment.networks.params, PROMPT, 1, pieces.append)
    assert "".join(pieces) == text + "\n\n" and len(pieces) > 2
    assert summary.startswith(f"{BUDGET} tokens in ") and f"rollout.max_new_tokens = {BUDGET}" in summary
    pieces.clear()
    summary = answer_prompt(experiment, experiment.networks.params, PROMPT, 3, pieces.append)
    assert len(pieces) == 3 and f" of 3 answers cut off at rollout.max_new_tokens = {BUDGET}" in summary


def test_row_30_an_end_by_a_stop_string_is_printed_without_it(experiment: Experiment) -> None:
    """It is as long as two tokens. What may begin it is not shown before it is known to."""
    text, _, _ = whole_answer(experiment)
    strings = find_stop_strings((text[4:6],), experiment.tokenizer)
    ended = replace(experiment.config.rollout, stop_strings=strings)
    other: Any = replace(experiment, config=replace(experiment.config, rollout=ended))
    shown, pieces = text[: text.index(text[4:6])], list[str]()
    assert whole_answer(other) == (shown + text[4:6], len(shown) + 2, True)
    summary = answer_prompt(other, other.networks.params, PROMPT, 1, pieces.append)
    assert summary.endswith("ended by a stop token or a stop string") and "".join(pieces) == shown + "\n\n"


def test_row_30_decoding_that_retracts_loses_nothing(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers remove the space before a full stop when they decode it."""
    text, _, _ = whole_answer(experiment)
    decode = experiment.tokenizer.decode

    def rewriting(ids: list[int]) -> str:
        return decode(ids) if len(ids) == BUDGET else "#" * len(decode(ids))

    monkeypatch.setattr(experiment.tokenizer, "decode", rewriting)
    pieces = list[str]()
    answer_prompt(experiment, experiment.networks.params, PROMPT, 1, pieces.append)
    assert "".join(pieces).endswith(text + "\n\n")
