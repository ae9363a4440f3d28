import json

import numpy as np
import pytest

from launch.cli.errors import ConfigError
from launch.data.arithmetic import arithmetic
from launch.data.batches import PromptPipeline, PromptTable, check_supervised, fixed_batches, supervised_batch
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def table(count: int, max_length: int = 4) -> PromptTable:
    """The prompts "0", "1", .."""
    return PromptTable.build([Problem(prompt=str(i), answer="") for i in range(count)], TOKENIZER, max_length)


def ids(pipeline: PromptPipeline, batches: int) -> list[list[int]]:
    return [next(pipeline).id.tolist() for _ in range(batches)]


def test_batches_hold_the_prompts_of_their_ids():
    batch = next(PromptPipeline(table(20), 6, seed=0))
    assert batch.tokens.shape == (6, 4)
    assert batch.tokens.dtype == batch.lengths.dtype == batch.id.dtype == np.int32
    for row, length, id in zip(batch.tokens, batch.lengths, batch.id, strict=True):
        assert TOKENIZER.decode(row[:length].tolist()) == str(id)
        assert not row[length:].any()


def test_prompts_that_do_not_fit_are_dropped_and_counted():
    problems = [Problem(prompt=prompt, answer="") for prompt in ["abc", "", "abcd", "abcde", "a"]]
    built = PromptTable.build(problems, TOKENIZER, max_length=4)
    assert built.dropped == 2
    assert sorted(ids(PromptPipeline(built, 3, seed=0), 1)[0]) == [0, 2, 4]


def test_every_epoch_is_shuffled_anew_and_holds_each_prompt_once():
    batches = ids(PromptPipeline(table(12), 4, seed=0), 9)
    epochs = [sum(batches[i : i + 3], []) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_ids_are_unique_in_a_batch_across_epochs():
    batches = ids(PromptPipeline(table(7), 4, seed=0), 50)
    assert all(len(set(batch)) == 4 for batch in batches)
    assert set(sum(batches, [])) == set(range(7))


def test_seed_decides():
    assert ids(PromptPipeline(table(12), 4, seed=1), 4) == ids(PromptPipeline(table(12), 4, seed=1), 4)
    assert ids(PromptPipeline(table(12), 4, seed=1), 4) != ids(PromptPipeline(table(12), 4, seed=2), 4)


@pytest.mark.parametrize("consumed", [0, 1, 3, 5])
def test_a_resumed_pipeline_continues_exactly(consumed: int):
    pipeline = PromptPipeline(table(12), 4, seed=3)
    ids(pipeline, consumed)
    state = json.loads(json.dumps(pipeline.get_state()))
    resumed = PromptPipeline(table(12), 4, seed=3)
    ids(resumed, 2)
    resumed.set_state(state)
    assert ids(resumed, 7) == ids(pipeline, 7)


def test_too_few_prompts_and_bad_seeds_are_config_errors():
    with pytest.raises(
        ConfigError, match=r"^data.prompts = 6: must be between 1 and 5, the usable prompts \(0 empty or over 4"
    ):
        PromptPipeline(table(5), 6, seed=0)
    with pytest.raises(ConfigError, match="^seed = -1: must"):
        PromptPipeline(table(5), 2, seed=-1)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (5, 2, [[0, 1], [2, 3], [4, -1]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 7, [[0, 1, -1, -2, -3, -4, -5]]),
    ],
)
def test_fixed_batches_cover_the_table_once(count: int, size: int, expected: list[list[int]]):
    batches = fixed_batches(table(count), size)
    assert [batch.id.tolist() for batch in batches] == expected
    for batch in batches:
        assert batch.tokens.shape == (size, 4)
        assert batch.id.dtype == np.int32
        assert (batch.lengths > 0).all()
        for row, length, id in zip(batch.tokens, batch.lengths, batch.id, strict=True):
            assert id < 0 or TOKENIZER.decode(row[:length].tolist()) == str(id)


def test_fixed_batches_of_nothing_is_a_config_error():
    with pytest.raises(ConfigError, match="^data.max_prompt_tokens = 4: none of 0 prompts"):
        fixed_batches(table(0), 2)


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


def test_supervised_batches_depend_on_seed_and_step_alone():
    problems = arithmetic(seed=0, count=30, min_terms=2, max_terms=3, max_value=9)

    def tokens(seed: int, step: int) -> bytes:
        return supervised_batch(problems, TOKENIZER, 8, 40, seed, step).tokens.tobytes()

    assert tokens(0, 5) == tokens(0, 5)
    assert len({tokens(0, 0), tokens(0, 1), tokens(1, 0)}) == 3


def test_supervised_batches_name_what_does_not_fit():
    problems = [Problem(prompt="1+1=", answer="2", solution="#2")]
    assert supervised_batch(problems, TOKENIZER, 1, 7, 0, 0).lengths.tolist() == [7]
    with pytest.raises(ConfigError, match=r"rollout.max_new_tokens = 6: must be at least 7, the tokens of problem 0"):
        supervised_batch(problems, TOKENIZER, 1, 6, 0, 0)
    with pytest.raises(ConfigError, match="^warmup.batch_size = 2: must be between 1 and 1"):
        supervised_batch(problems, TOKENIZER, 2, 7, 0, 0)
    with pytest.raises(ConfigError, match="^warmup.steps: problem 0 has no solution"):
        supervised_batch([Problem(prompt="x", answer="")], TOKENIZER, 1, 7, 0, 0)


def test_the_one_problem_that_no_supervised_batch_could_hold_is_found_at_once():
    problems = [Problem(prompt="1+1=", answer="2", solution="#2")] * 99
    check_supervised(problems, TOKENIZER, batch_size=1, length=7)
    with pytest.raises(
        ConfigError, match=r"^data.max_prompt_tokens \+ rollout.max_new_tokens = 7: must be at least 8, .* problem 99"
    ):
        check_supervised([*problems, Problem(prompt="9+9=", answer="18", solution="#18")], TOKENIZER, 1, 7)
    with pytest.raises(ConfigError, match="^warmup.batch_size = 100: must be between 1 and 99"):
        check_supervised(problems, TOKENIZER, 100, 7)
