"""Hints in the prompts of a teacher's rows, against rows written by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.train.hints import HintTemplate, group_hints, with_hints
from specjax.train.loss_context import LossContext
from specjax.types import Hints, Rollout
from tests.specjax import training
from tests.specjax.test_teacher import CONTEXT, POLICY, ROWS

TEMPLATE = HintTemplate(before=(7, 8), after=(9,), tail=1)


def by_hand(prompt: list[int], completion: list[int], hint: list[int]) -> list[int]:
    inside = [7, 8, *hint, 9] if hint else []
    return [*prompt[:-1], *inside, *prompt[-1:], *completion]


def test_a_hint_stands_before_the_tail_of_the_prompt() -> None:
    prompts, completions, hints = [[1, 2, 3], [4], [5, 6]], [[11, 12], [13], [14, 15, 16]], [[21, 22], [], [23]]
    rows, starts = np.zeros((3, 6), np.int32), np.array(list(map(len, prompts)), np.int32)
    table = np.zeros((3, 4), np.int32)
    for i, (prompt, completion, hint) in enumerate(zip(prompts, completions, hints, strict=True)):
        rows[i, : len(prompt) + len(completion)] = prompt + completion
        table[i, : len(hint)] = hint
    lengths = jnp.array([len(hint) for hint in hints], jnp.int32)
    found, longer = with_hints(jnp.asarray(rows), jnp.asarray(starts), Hints(jnp.asarray(table), lengths), TEMPLATE)
    assert found.shape[1] == rows.shape[1] + TEMPLATE.most(table.shape[1])
    for i, expected in enumerate(map(by_hand, prompts, completions, hints)):
        assert found[i, : len(expected)].tolist() == expected
        assert not np.asarray(found)[i, len(expected) :].any()
        assert int(longer[i]) == len(expected) - len(prompts[i]) - len(completions[i])


def test_a_group_lends_its_first_correct_completion_without_its_end() -> None:
    """Test two groups of three: one with two correct completions, one with a single one, which has no other."""
    tokens = jnp.arange(1, 19, dtype=jnp.int32).reshape(6, 3)
    rollout = Rollout(
        tokens, jnp.array([3, 2, 3, 3, 1, 3], jnp.int32), jnp.array([True, True, False, True, True, True])
    )
    correct = jnp.array([False, True, True, False, False, True])
    hints = group_hints(rollout, correct, 3)
    rows = [row[:length].tolist() for row, length in zip(np.asarray(hints.tokens), hints.lengths, strict=True)]
    # Row 1 ended by a stop token after one other; row 2 at the budget.
    assert rows == [[4], [7, 8, 9], [4], [16, 17], [16, 17], []]


def test_the_teacher_reads_hints_and_the_policy_does_not() -> None:
    """Test the teacher's laws at completion tokens against a forward over rows written by hand."""
    batch = training.ragged_batch(ROWS, 14)
    starts = np.asarray(jnp.argmax(batch.completion, axis=1))
    hints = Hints(jnp.tile(jnp.array([[4, 5, 6]], jnp.int32), (ROWS, 1)), jnp.array([0, 1, 2, 3] * 2, jnp.int32))
    template = HintTemplate((7, 8), (9,), 1)
    context: LossContext = replace(CONTEXT, hint_template=template)
    weights = training.params_on(training.mesh_of(1, 1, 1)).policy

    @jax.jit
    def hinted(weights):
        output, longer = context.teacher_forward(weights, replace(batch, hints=hints))
        return POLICY.unembed(weights, output.hidden), longer

    logits, longer = hinted(weights)
    forward = jax.jit(lambda weights, tokens: POLICY.apply(weights, tokens, jnp.zeros(1, jnp.int32)).logits)
    for row in range(ROWS):
        start, count = int(starts[row]), int(batch.completion[row].sum())
        prompt, completion = (
            np.asarray(batch.tokens)[row, part].tolist() for part in (slice(start), slice(start, start + count))
        )
        ids = by_hand(prompt, completion, np.asarray(hints.tokens)[row, : int(hints.lengths[row])].tolist())
        padded = np.zeros((1, logits.shape[1]), np.int32)
        padded[0, : len(ids)] = ids
        expected = np.asarray(forward(weights, jnp.asarray(padded)))[0]
        at = start - 1 + int(longer[row])
        np.testing.assert_allclose(
            logits[row, at : at + count], expected[len(ids) - count - 1 : len(ids) - 1], atol=2e-5
        )
