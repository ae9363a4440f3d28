"""Batches of prompts, and of problems with their solutions."""

import json

import numpy as np
import pytest

from launch.cli.errors import ConfigError
from launch.data.arithmetic import arithmetic
from launch.data.batches import PromptPipeline, PromptTable, fixed_batches
from launch.data.problems import Problem
from launch.data.supervised import check_supervised, supervised_batch
from launch.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def table(*prompts: str) -> PromptTable:
    return PromptTable.build([Problem(prompt=prompt, answer="") for prompt in prompts], TOKENIZER, max_length=4)


def numbers(count: int) -> PromptTable:
    """The prompts "0", "1", .."""
    return table(*map(str, range(count)))


def ids(pipeline: PromptPipeline, batches: int) -> list[list[int]]:
    return [next(pipeline).id.tolist() for _ in range(batches)]


def test_batches_hold_the_prompts_of_their_ids():
    batch = next(PromptPipeline(numbers(20), 6, seed=0))
    assert batch.tokens.shape == (6, 4)
    assert batch.tokens.dtype == batch.lengths.dtype == batch.id.dtype == np.int32
    for row, length, id in zip(batch.tokens, batch.lengths, batch.id, strict=True):
        assert TOKENIZER.decode(row[:length].tolist()) == str(id)
        assert not row[length:].any()


def test_prompts_that_do_not_fit_are_dropped_and_counted():
    built = table("abc", "", "abcd", "abcde", "a")
    assert built.dropped == 2
    assert sorted(ids(PromptPipeline(built, 3, seed=0), 1)[0]) == [0, 2, 4]


def test_every_epoch_is_another_permutation_by_the_seed():
    batches = ids(PromptPipeline(numbers(12), 4, seed=1), 9)
    epochs = [sum(batches[i : i + 3], []) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(PromptPipeline(numbers(12), 4, seed=1), 9) == batches != ids(PromptPipeline(numbers(12), 4, seed=2), 9)


def test_ids_are_unique_in_a_batch_across_epochs():
    batches = ids(PromptPipeline(numbers(7), 4, seed=0), 50)
    assert all(len(set(batch)) == 4 for batch in batches)
    assert set(sum(batches, [])) == set(range(7))


@pytest.mark.parametrize("consumed", [0, 1, 3, 5])
def test_a_resumed_pipeline_continues_exactly(consumed: int):
    pipeline = PromptPipeline(numbers(12), 4, seed=3)
    ids(pipeline, consumed)
    state = json.loads(json.dumps(pipeline.get_state()))
    resumed = PromptPipeline(numbers(12), 4, seed=3)
    ids(resumed, 2)
    resumed.set_state(state)
    assert ids(resumed, 7) == ids(pipeline, 7)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(5, 2, [[0, 1], [2, 3], [4, -1]]), (4, 2, [[0, 1], [2, 3]]), (2, 7, [[0, 1, -1, -2, -3, -4, -5]])],
)
def test_fixed_batches_cover_the_table_once(count: int, size: int, expected: list[list[int]]):
    batches = fixed_batches(numbers(count), size)
    assert [batch.id.tolist() for batch in batches] == expected
    for batch in batches:
        assert batch.tokens.shape == (size, 4)
        assert batch.id.dtype == np.int32
        assert (batch.lengths > 0).all()
        for row, length, id in zip(batch.tokens, batch.lengths, batch.id, strict=True):
            assert id < 0 or TOKENIZER.decode(row[:length].tolist()) == str(id)


def test_supervised_rows_are_prompt_solution_stop():
    problems = arithmetic(seed=0, count=30, min_terms=2, max_terms=3, max_value=9)
    batch = supervised_batch(problems, TOKENIZER, batch_size=8, length=40, seed=0, step=0)
    texts = {problem.prompt: problem.solution for problem in problems}
    seen = set()
    for row, length, prompt_length in zip(*batch, strict=True):
        prompt = bytes(row[:prompt_length].tolist()).decode()
        assert bytes(row[prompt_length : length - 1].tolist()).decode() == texts[prompt]
        assert row[length - 1] == 256
        assert not row[length:].any()
        seen.add(prompt)
    assert len(seen) == 8
    assert [array.dtype for array in batch] == [np.int32] * 3

    def tokens(seed: int, step: int) -> bytes:
        return supervised_batch(problems, TOKENIZER, 8, 40, seed, step).tokens.tobytes()

    assert tokens(0, 0) == batch.tokens.tobytes()
    assert len({tokens(0, 0), tokens(0, 1), tokens(1, 0)}) == 3


ONE, LONG = Problem(prompt="1+1=", answer="2", solution="#2"), Problem(prompt="9+9=", answer="18", solution="#18")


def test_refusals():
    """`check_supervised` finds the one problem that no batch could hold, whichever a batch draws."""
    supervised_batch([ONE], TOKENIZER, 1, 7, 0, 0)
    check_supervised([ONE] * 99, TOKENIZER, batch_size=1, length=7)
    fits = r"data.max_prompt_tokens \+ rollout.max_new_tokens"
    for message, run in {
        r"data.prompts = 6: must be between 1 and 5, .* \(0 empty": lambda: PromptPipeline(numbers(5), 6, seed=0),
        "seed = -1: must": lambda: PromptPipeline(numbers(5), 2, seed=-1),
        "data.max_prompt_tokens = 4: none of 0 prompts": lambda: fixed_batches(numbers(0), 2),
        f"{fits} = 6: must be at least 7, .* problem 0": lambda: supervised_batch([ONE], TOKENIZER, 1, 6, 0, 0),
        "warmup.batch_size = 2: must be between 1 and 1": lambda: supervised_batch([ONE], TOKENIZER, 2, 7, 0, 0),
        "warmup.steps: problem 0 has no solution": lambda: supervised_batch(
            [Problem(prompt="x", answer="")], TOKENIZER, 1, 7, 0, 0
        ),
        f"{fits} = 7: must be at least 8, .* problem 99": lambda: check_supervised(
            [*[ONE] * 99, LONG], TOKENIZER, 1, 7
        ),
        "warmup.batch_size = 9: must be between 1 and 2": lambda: check_supervised([ONE, ONE], TOKENIZER, 9, 7),
    }.items():
        with pytest.raises(ConfigError, match=f"^{message}"):
            run()
