"""Batches of prompts, and of problems with their solutions."""

import json

import numpy as np
import pytest

from launch.data.arithmetic import arithmetic
from launch.data.batches import PromptPipeline, PromptTable, fixed_batches, prompt_pipeline
from launch.data.problems import Problem
from launch.data.responses import worked_solutions
from launch.data.tokenizers import ByteTokenizer
from launch.errors import ConfigError
from tests.refusals import refuses

TOKENIZER = ByteTokenizer()


def table(*prompts: str) -> PromptTable:
    problems = [Problem(prompt=prompt, answer="") for prompt in prompts]
    return PromptTable.build(problems, TOKENIZER, max_length=4, vocab_size=257)


def numbers(count: int) -> PromptTable:
    """Return problems with the prompts "0", "1", .."""
    return table(*map(str, range(count)))


def ids(pipeline: PromptPipeline, batches: int) -> list[list[int]]:
    return [next(pipeline).id.tolist() for _ in range(batches)]


def test_batches_hold_the_prompts_of_their_ids():
    batch = next(prompt_pipeline(numbers(20), 6, seed=0))
    assert batch.tokens.shape == (6, 4)
    assert batch.tokens.dtype == batch.lengths.dtype == batch.id.dtype == np.int32
    for row, length, id in zip(batch.tokens, batch.lengths, batch.id, strict=True):
        assert TOKENIZER.decode(row[:length].tolist()) == str(id)
        assert not row[length:].any()


def test_prompts_that_do_not_fit_are_dropped_and_counted():
    built = table("abc", "", "abcd", "abcde", "a")
    assert built.dropped == 2
    assert sorted(ids(prompt_pipeline(built, 3, seed=0), 1)[0]) == [0, 2, 4]


def test_rows_are_padded_to_the_longest_usable_prompt_rounded_up():
    widths = [
        PromptTable.build([Problem(prompt="a" * length, answer="") for length in lengths], TOKENIZER, 40, 257).width
        for lengths in ([1, 3], [16], [17, 2], [39], [3, 41], [], [41])
    ]
    assert widths == [16, 16, 32, 40, 16, 40, 40]


def test_every_epoch_is_another_permutation_by_the_seed():
    batches = ids(prompt_pipeline(numbers(12), 4, seed=1), 9)
    epochs = [sum(batches[i : i + 3], []) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(prompt_pipeline(numbers(12), 4, seed=1), 9) == batches != ids(prompt_pipeline(numbers(12), 4, seed=2), 9)


def test_prompts_are_taken_once_in_an_epoch_and_those_in_use_are_taken_later():
    pipeline, other = (prompt_pipeline(numbers(6), 3, seed=0) for _ in range(2))
    taken, used = [], []
    for count in [3, 1, 2, 0, 3, 2, 1] * 4:
        batch = pipeline.take(count, used[:2]).id.tolist()
        assert len({*batch, *used[:2]}) == count + len(used[:2])
        other.set_state(json.loads(json.dumps(pipeline.get_state())))
        taken, used = taken + batch, batch
    assert other.take(3).id.tolist() == pipeline.take(3).id.tolist()
    # 48 prompts are 8 epochs of 6. One that was in use may have its turn yet to come.
    assert max(counts := [taken.count(number) for number in range(6)]) - min(counts) <= 2


def test_ids_are_unique_in_a_batch_across_epochs():
    batches = ids(prompt_pipeline(numbers(7), 4, seed=0), 50)
    assert all(len(set(batch)) == 4 for batch in batches)
    assert set(sum(batches, [])) == set(range(7))


@pytest.mark.parametrize("consumed", [0, 1, 3, 5])
def test_a_resumed_pipeline_continues_exactly(consumed: int):
    pipeline = prompt_pipeline(numbers(12), 4, seed=3)
    ids(pipeline, consumed)
    state = json.loads(json.dumps(pipeline.get_state()))
    resumed = prompt_pipeline(numbers(12), 4, seed=3)
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


def test_solutions_are_joined_to_their_prompts_and_ended():
    problems = arithmetic(seed=0, count=30, min_terms=2, max_terms=3, max_value=9)
    solutions = worked_solutions(problems, TOKENIZER, length=40, vocab_size=257)
    completions = solutions.batch(np.arange(30)).completion
    for problem, row, batch_row in zip(problems, solutions.tokens, completions, strict=True):
        prompt, solution = problem.prompt.encode(), [*(problem.solution or "").encode(), 256]
        assert row.tolist() == [*prompt, *solution] + [0] * (32 - len(prompt) - len(solution))
        assert np.flatnonzero(batch_row).tolist() == [*range(len(prompt), len(prompt) + len(solution))]
    tokens = [solutions.draw(8, seed, step).tokens for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert [len({row.tobytes() for row in drawn}) for drawn in tokens] == [8] * 4
    assert len({drawn.tobytes() for drawn in tokens}) == 3


ONE, LONG = Problem(prompt="1+1=", answer="2", solution="#2"), Problem(prompt="9+9=", answer="18", solution="#18")


def test_refusals():
    worked_solutions([ONE] * 99, TOKENIZER, length=7, vocab_size=257)
    fits, long = "data.max_prompt_tokens + rollout.max_new_tokens", "data.max_prompt_tokens = 4: all"
    for message, run in {
        "data.prompts = 6: ...1...5": lambda: prompt_pipeline(numbers(5), 6, seed=0),
        "seed = -1: ": lambda: prompt_pipeline(numbers(5), 2, seed=-1),
        "data.max_prompt_tokens = 4: ": lambda: fixed_batches(numbers(0), 2),
        f"{long} 2 prompts...5 tokens; must be at least 5, or 6": lambda: prompt_pipeline(
            table("6" * 6, "5" * 5), 1, 0
        ),
        f"{long} 1 non-empty prompts...5 tokens; must be at least 5": lambda: fixed_batches(table("", "abcde"), 1),
        "data.prompts = 1: ...1...0": lambda: prompt_pipeline(table("", ""), 1, 0),
        "warmup.steps: ...0...solution": lambda: worked_solutions([Problem(prompt="x", answer="")], TOKENIZER, 7, 257),
        f"{fits} = 7: ...8...99": lambda: worked_solutions([*[ONE] * 99, LONG], TOKENIZER, 7, 257),
    }.items():
        with refuses(message, ConfigError):
            run()
