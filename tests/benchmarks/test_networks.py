"""The head that benchmarks distil is a draft of the policy they made."""

import numpy as np
import pytest

from benchmarks.long_tail import MESH
from benchmarks.networks import distilled, random_prompts, small
from launch.build.networks import Networks
from specjax.keys import seed_step
from specjax.rollout.generate import make_generate
from specjax.rollout.plan import RolloutConfig


def acceptance(networks: Networks) -> float:
    """Of the first tokens that were drafted."""
    prompts = random_prompts(np.random.default_rng(0), count=32, width=4)
    config = RolloutConfig(group_size=1, max_new_tokens=8, draft_length=1)
    rollout = make_generate(networks.policy, networks.drafter, config, MESH)(networks.params, prompts, seed_step(1, 0))
    return float(rollout.accepted.sum() / rollout.drafted.sum())


@pytest.mark.slow
def test_a_distilled_head_is_accepted_where_a_random_one_is_not():
    random = small(1, MESH)
    assert acceptance(random) < 0.2
    assert acceptance(distilled(random, MESH, steps=60)) > 0.25
