"""Completions stop at the lengths that the benchmark sets, with the same tokens for every plan and draft length."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.long_tail import MESH, STOP, Job, check, plans
from benchmarks.networks import small

JOB = Job(small(1, MESH), sequences=16, median=3, tail=2)
RUNS = ("single", 0), ("phases", 0), ("both", 2)


@pytest.mark.slow
def test_every_plan_gives_the_same_tokens_at_the_forced_lengths():
    laid = plans(JOB.sequences, JOB.median)
    rollouts = check(JOB, {f"{name} {k}": JOB.rollout(laid[name], k) for name, k in RUNS})
    assert sorted(JOB.lengths)[-2:] == [24, 24] and len(set(JOB.lengths.tolist())) > 3
    for rollout in rollouts.values():
        stops = np.asarray(rollout.tokens) == STOP
        assert np.asarray(rollout.stopped).all()
        np.testing.assert_array_equal(stops.sum(axis=1), 1)
        np.testing.assert_array_equal(stops.argmax(axis=1), JOB.lengths - 1)
    with pytest.raises(AssertionError, match="single 0"):
        check(replace(JOB, tail=3), {"single 0": lambda: rollouts["single 0"]})
    other = replace(rollouts["single 0"], tokens=rollouts["single 0"].tokens.at[3, 0].add(1))
    with pytest.raises(AssertionError, match="other"):
        check(JOB, {"other": lambda: other}, rollouts["single 0"])
