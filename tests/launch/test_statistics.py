"""pass@k, majority@k and their intervals, compared with their definitions."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from launch.evaluation.statistics import majority_at_k, over_prompts, pass_at_k


@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(k: int):
    correct = np.random.default_rng(k).random((20, 5)) < 0.3
    expected = [np.mean([row[list(chosen)].any() for chosen in combinations(range(5), k)]) for row in correct]
    np.testing.assert_allclose(pass_at_k(correct, k), expected, atol=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.arange(4096)[None] < 1
    assert pass_at_k(correct, 1024) == pytest.approx(0.25)


def test_the_majority_decides():
    correct = np.array([[True, True, False, False, False, False]])

    def majority(answers: str, k: int) -> float:
        given = [None if answer == "-" else answer for answer in answers]
        return majority_at_k([given], correct, k).item()

    # Two correct samples and four wrong ones, whose answers are: one, four, two of two each, or none.
    assert majority("--aaaa", 6) == 0
    assert majority("--abcd", 6) == 1
    assert majority("--aabb", 6) == pytest.approx(1 / 3)
    assert majority("------", 6) == 1
    # Separate groups: both samples are correct, then all are wrong. Leftover samples belong to no group.
    assert majority("--aabb", 2) == pytest.approx(1 / 3)
    assert majority("--aabb", 4) == pytest.approx(1 / 2)
    assert majority_at_k([["a", None]], np.array([[False, False]]), 2).item() == 0
    assert majority_at_k([[None, None]], np.array([[False, False]]), 2).item() == 0


def test_majority_at_1_is_the_accuracy():
    correct = np.random.default_rng(0).random((20, 5)) < 0.3
    answers = [[None if right else "wrong" for right in row] for row in correct]
    np.testing.assert_allclose(majority_at_k(answers, correct, 1), correct.mean(axis=1))


def test_values_of_0_and_1_have_the_wilson_interval():
    # A textbook example: 20 of 100.
    assert over_prompts(np.arange(100) < 20) == pytest.approx((0.2, 0.1334, 0.2888), abs=1e-4)
    # The interval is not empty if all samples are wrong.
    assert over_prompts(np.zeros(10)) == pytest.approx((0, 0, 0.2775), abs=1e-4)
    assert over_prompts(np.ones(10)) == pytest.approx((1, 0.7225, 1), abs=1e-4)


def test_intervals_of_fractions_have_the_stated_coverage():
    truth, inside = 0.3, Counter()
    source = np.random.default_rng(0)
    for _ in range(60):
        chances = source.choice([0.1, 0.5], 40)
        value, low, high = over_prompts(source.binomial(4, chances) / 4)
        assert low < value < high
        inside[low <= truth <= high] += 1
    assert inside[True] >= 51


def test_one_wrong_sample_changes_the_interval_little():
    right, nearly = np.ones(30), np.append(np.ones(29), 7 / 8)
    assert over_prompts(nearly).low == pytest.approx(over_prompts(right).low, abs=0.02)
    # Samples of a prompt may agree by chance. One such prompt is weak evidence, fifty are strong.
    assert over_prompts(np.array([0.5])).high - over_prompts(np.array([0.5])).low > 0.7
    assert 0.02 < over_prompts(np.full(50, 0.5)).high - 0.5 < 0.05
