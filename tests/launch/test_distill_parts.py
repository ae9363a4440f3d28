"""Parts of launch.distill: answers, vocabularies, counts, and the break-even point."""

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from launch.acceptance.counts import DraftRecords, count_drafts, length_buckets
from launch.data.answer_files import answer_records, load_answers
from launch.data.arithmetic import ALPHABET
from launch.data.batches import PromptTable
from launch.data.json_lines import JsonLinesWriter
from launch.data.problems import Problem
from launch.data.responses import Answers, answers_of, join_answers
from launch.data.tokenizers import CharacterTokenizer
from launch.distillation.teacher_outputs import TeacherOutputCache, picks_of_step
from launch.distillation.trainer import DraftTrainer
from launch.setup.draft_vocabulary import most_frequent
from specjax.adapters import joined, merged
from specjax.log_probs import teacher_forced
from specjax.train.draft.distill import DistillBatch
from specjax.types import PyTree, Rollout
from tests.launch.programs import SMALLEST
from tests.specjax.test_adapters import adapted_params
from tests.specjax.training import mesh_of, networks, params_on


def test_answers_from_a_file_make_the_same_batches(tmp_path: Path):
    tokenizer = CharacterTokenizer(ALPHABET)
    problems = [Problem(prompt=text, answer="") for text in ("1+2=", "3+4+5=", "7+8=")]
    table = PromptTable.build(problems, tokenizer, 8, 15)
    rng, lengths = np.random.default_rng(0), np.array([3, 1, 5, 4, 2, 5], np.int32)
    tokens = np.where(np.arange(5)[None] < lengths[:, None], rng.integers(1, 15, size=(6, 5)), 0).astype(np.int32)
    prompts = table.batch(np.array([2, 0, 1]))
    made = answers_of(prompts, Rollout(jnp.asarray(tokens), jnp.asarray(lengths)))
    (tmp_path / "answers.jsonl").write_text("what an earlier run has left")
    file = JsonLinesWriter("save_responses", tmp_path / "answers.jsonl")
    for rows in (slice(2), slice(2, 6)):
        part = Answers(*(getattr(made, field.name)[rows] for field in fields(Answers)))
        file.append(answer_records(part, problems, tokenizer))
    read, notes = load_answers(tmp_path / "answers.jsonl", tokenizer, 8, 5, 15)
    assert not notes
    for step in range(3):
        ours, theirs = made.draw(4, 7, step), read.draw(4, 7, step)
        np.testing.assert_array_equal(theirs.tokens, ours.tokens)
        np.testing.assert_array_equal(theirs.completion, ours.completion)
    # Each row holds the prompt, the answer and padding. Filler rows have no tokens to train on.
    for row, (pick, length) in enumerate(zip((2, 2, 0, 0, 1, 1), lengths, strict=True)):
        prompt = tokenizer.encode(problems[pick].prompt)
        expected = [*prompt, *tokens[row, :length].tolist()]
        assert made.tokens[row].tolist() == expected + [0] * (13 - len(expected))
        assert made.batch(np.array([row, -1])).completion.sum() == length
    batches, twice = list(made.in_batches(4)), join_answers([made, made])
    assert [int(batch.completion.sum()) for batch in batches] == [int(lengths[:4].sum()), int(lengths[4:].sum())]
    assert len(twice) == 12 and len(twice.completions) == 2 * lengths.sum()


def test_passes_take_all_rows_in_batches_of_similar_length():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    steps = [picks_of_step(lengths, 8, seed=3, step=step) for step in range(50)]
    for first in (0, 25):
        assert sorted(np.concatenate(steps[first : first + 25])) == list(range(200))
    spread = np.mean([np.ptp(lengths[picks]) for picks in steps])
    assert spread < 0.3 * np.mean([np.ptp(lengths[np.random.default_rng(i).permutation(200)[:8]]) for i in range(50)])
    # Short rows are not all first, and the next pass has other batches.
    assert np.std([lengths[picks].mean() for picks in steps[:5]]) > 5
    assert not any(set(picks) == set(other) for picks in steps[:25] for other in steps[25:])
    np.testing.assert_array_equal(picks_of_step(lengths, 8, seed=3, step=30), steps[30])


@pytest.mark.parametrize("memory", [2**40, 0])
def test_the_policys_forward_is_kept_once_for_each_answer(memory: int, monkeypatch: pytest.MonkeyPatch):
    """It is kept in memory or in a file, and padded to a few widths."""
    monkeypatch.setattr("launch.distillation.teacher_outputs.host_memory", lambda: memory)
    policy, mesh = networks()[0], mesh_of(1, 1, 1)
    calls, widths, counts = [], set(), set()
    apply = policy.apply

    def counted(*args, **options):
        calls.append(args[1].shape)
        return apply(*args, **options)

    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 16, 3).tolist(), rng.integers(0, 16, n).tolist()) for n in (1, 20, 4, 9, 2, 30, 3, 5, 17)]
    answers, weights = Answers.pad([-1] * 9, pairs, 48), params_on(mesh).policy
    cache = TeacherOutputCache(replace(policy, apply=counted), mesh, weights, 2, 30)
    cache.extend(answers.first(6))
    cache.extend(answers)
    ran = len(calls)
    for picks in ([0, 4], [1, 5], [8, 2]):
        batch, teacher, anchors = cache.batch(answers, np.array(picks))
        widths.add(batch.tokens.shape[1])
        output = jax.jit(partial(teacher_forced, policy))(weights, batch.tokens)
        counted = np.zeros_like(batch.completion)
        np.put_along_axis(counted, np.asarray(anchors.place), np.asarray(anchors.weight) > 0, axis=1)
        np.testing.assert_array_equal(counted, batch.completion)
        counts.add(anchors.place.shape[1])
        valid = (np.arange(batch.tokens.shape[1])[None] < answers.lengths[picks, None])[..., None]
        np.testing.assert_allclose(teacher.features, np.where(valid, output.features, 0), atol=1e-5)
        np.testing.assert_allclose(teacher.hidden, np.where(valid, output.hidden, 0), atol=1e-5)
    assert len(calls) == ran <= 5 and len(widths) > 1 and max(widths) < 48 and len(counts) > 1


def test_a_draft_is_distilled_from_features_of_the_policy_with_its_adapters(monkeypatch: pytest.MonkeyPatch):
    """B is not 0, so that base and policy differ."""
    (policy, drafter), mesh, seen = networks(), mesh_of(1, 1, 1), list[tuple[PyTree, DistillBatch]]()

    class Recorder:
        """Stands for the distillation step, and keeps what it gets."""

        def __init__(self, *args: object, **options: object) -> None: ...

        def start_compiling(self, *args: object) -> None: ...

        def __call__(self, state: PyTree, weights: PyTree, batch: DistillBatch) -> tuple[PyTree, dict[str, float]]:
            seen.append((weights, batch))
            return state, {"loss/draft": 0.0, "draft/predicted_acceptance": 0.0}

    monkeypatch.setattr("launch.distillation.trainer.make_distill_step", Recorder)
    params, config = adapted_params(mesh, b_scale=0.3), override(SMALLEST, {"distill.batch_size": 2})
    experiment: Any = SimpleNamespace(config=config, networks=SimpleNamespace(policy=policy), mesh=mesh)
    answers = Answers.pad([-1] * 2, [([1, 2, 3], [4] * n) for n in (5, 7)], 10)
    DraftTrainer(experiment, drafter, params, 1).train(answers, 1)
    (weights, batch) = seen[0]
    tokens, forward = np.asarray(batch.sequences.tokens), jax.jit(partial(teacher_forced, policy))
    full, base = (forward(x, tokens) for x in (jax.jit(merged)(params).policy, params.base))
    for name in ("features", "hidden"):
        found, expected, off = (np.asarray(getattr(x, name))[tokens != 0] for x in (batch.teacher, full, base))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(found - off).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, weights, joined(params).policy)


def test_a_ladder_sets_the_widths_of_the_kept_forward():
    """Longer rows have the usual widths. A ladder with the longest possible row makes one program."""
    policy, mesh = networks()[0], mesh_of(1, 1, 1)
    answers = Answers.pad([-1] * 2, [([1, 2, 3], [4] * n) for n in (5, 40)], 48)
    for ladder, sizes in (((12,), [(12, 12), (48, 40)]), ((48,), [(48, 45), (48, 45)])):
        cache = TeacherOutputCache(policy, mesh, params_on(mesh).policy, 1, 45, ladder=ladder)
        cache.extend(answers)
        batches = [cache.batch(answers, np.array([pick])) for pick in (0, 1)]
        assert [(batch.tokens.shape[1], anchors.place.shape[1]) for batch, _, anchors in batches] == sizes


def test_a_response_without_tokens_is_read_as_text(tmp_path: Path):
    tokenizer, path = CharacterTokenizer(ALPHABET), tmp_path / "answers.jsonl"
    lines = [{"prompt": "1+2=", "response": "3#3"}, {"prompt": "1+2+3+4=", "response": "3"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    answers, notes = load_answers(path, tokenizer, 6, 3, 15)
    dropped = "1 of 2 responses dropped: prompt empty or over 6 tokens"
    assert notes == ["1 of 2 responses cut to 3 tokens (rollout.max_new_tokens)", dropped]
    # Answers are cut at the budget, or end with the stop token.
    assert answers.completions.tolist() == tokenizer.encode("3#3")
    answers, _ = load_answers(path, tokenizer, 6, 4, 15)
    assert answers.completions.tolist() == [*tokenizer.encode("3#3"), tokenizer.stop_tokens[0]]


def test_the_most_frequent_tokens_and_the_stop_tokens_are_kept():
    counts = np.array([5, 0, 9, 1, 9, 0, 2])
    assert most_frequent(counts, (5,), 4).tolist() == [0, 2, 4, 5]
    assert most_frequent(counts, (1, 5), 3).tolist() == [1, 2, 5]
    assert most_frequent(np.zeros(5), (3,), 3).tolist() == [0, 1, 3]


def test_full_acceptance_gives_draft_length_plus_one_tokens():
    """Rows have three full rounds of draft length 3 after the first token. One ends with its second drafted token."""
    same, filler = [3, 3, 3], [9, 9, 9]
    rollout = Rollout(
        tokens=jnp.zeros((4, 13), jnp.int32),
        lengths=jnp.array([13, 13, 7, 2]),
        row_rounds=jnp.array([3, 3, 2, 9]),
        drafted=jnp.array([same, same, [2, 2, 1], filler]),
        accepted=jnp.array([same, same, [2, 2, 1], filler]),
    )
    full = count_drafts(DraftRecords.of(rollout, np.array([True, True, False, False])))
    assert (full.sequences, full.rounds, full.tokens, full.ended) == (2, 6, 24, 0)
    assert full.rates == [1, 1, 1] and full.alpha == 4
    cut = count_drafts(DraftRecords.of(rollout, np.array([False, False, True, False])))
    assert (cut.tokens, cut.ended, cut.alpha) == (6, 1, 3)
    assert count_drafts(DraftRecords.of(rollout, np.zeros(4, bool))).alpha is None
    assert length_buckets(np.array([1, 16, 17, 32, 33, 100])).tolist() == [16, 16, 32, 32, 64, 128]
