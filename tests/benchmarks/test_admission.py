"""Every way to admit waiting sequences gives the tokens of plain decoding without a queue."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from benchmarks.admission_loops import conditional, reading
from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from tests.tiny import WANDERING as WORLD

RUN, BUDGET = seed_step(3, 5), 12
LONGEST = WORLD.batch.tokens.shape[1] + BUDGET


BASE = RolloutConfig(group_size=4, max_new_tokens=BUDGET, verifier="coupled", stop_tokens=WORLD.stops)


def config(draft_length: int, **options: tuple[tuple[int, int], ...]) -> RolloutConfig:
    return replace(BASE, draft_length=draft_length, **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", [conditional, reading])
@pytest.mark.parametrize("k", [0, 2])
def test_tokens_do_not_depend_on_the_way_of_admission(way, k: int):
    expected = jax.jit(partial(speculative_rollout, WORLD.policy, NoDrafter(), config=config(0)))
    expected = expected(WORLD.params("none"), WORLD.batch, RUN)
    program = jax.jit(partial(way, WORLD.policy, WORLD.drafters["eagle3"], config=config(k, phases=((5, LONGEST),))))
    rollout = program(WORLD.params("random"), WORLD.batch, RUN)
    assert len(set(np.asarray(expected.lengths).tolist())) > 3
    for name in ("tokens", "lengths", "stopped"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
