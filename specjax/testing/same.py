"""Comparison of rollouts with plain decoding, token by token."""

import numpy as np

from specjax.adapters import joined
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import SeedStep, seed_step
from specjax.parallel import processes
from specjax.rollout.generate import RolloutFn
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.environments import sampler
from specjax.testing.proposals import refuse_without_proposals
from specjax.types import Params, Policy, Prompts, Rollout


def assert_same_rollout(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    prompts: Prompts,
    config: RolloutConfig,
    *,
    rollout_fn: RolloutFn = speculative_rollout,
    run: SeedStep | None = None,
    tolerance: float = 1e-4,
) -> Rollout:
    """Assert that `coupled` or greedy completions equal those of draft length 0 without drafter, queue or phases.

    Compares tokens and lengths, and if the rollout reports them, stops and log-probs (within `tolerance`). run: the
    (seed, step) of both rollouts. The test is deterministic. Returns the drafted rollout.

    Raises AssertionError at the first difference. Raises ValueError for `rejection` and `block`, which keep only the
    law, and if nothing was drafted although `config` drafts. A Verifier of your own is tested as it is.
    """
    if config.verifier in ("rejection", "block") and config.law.temperature > 0:
        raise ValueError(f"verifier = {config.verifier}: must be coupled, or the temperature 0, for the same tokens")
    plainly = RolloutConfig(
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        draft_length=0,
        verifier=config.verifier,
        law=config.law,
        stop_tokens=config.stop_tokens,
        stop_strings=config.stop_strings,
        environment=config.environment,
        turns=config.turns,
        turn_tokens=config.turn_tokens,
    )
    params, run = joined(params), seed_step(0, 0) if run is None else run
    plain = sampler(speculative_rollout, policy, NoDrafter(), plainly)(Params(params.policy, {}), prompts, run)
    drafted = sampler(rollout_fn, policy, drafter, config)(params, prompts, run)
    _compare(drafted, plain, tolerance)
    refuse_without_proposals(config, [drafted])
    return drafted


def _compare(drafted: Rollout, plain: Rollout, tolerance: float) -> None:
    parted = np.argwhere(np.not_equal(*processes.fetch((drafted.tokens, plain.tokens))))
    if len(parted):
        row, at = parted[0]
        raise AssertionError(
            f"not the same tokens: row {row} has {drafted.tokens[row, at]} at {at}, {plain.tokens[row, at]} in plain "
            f"decoding ({len(np.unique(parted[:, 0]))} of {len(plain.tokens)} rows differ)"
        )
    np.testing.assert_array_equal(drafted.lengths, plain.lengths, err_msg="lengths")
    if drafted.stopped is not None:
        np.testing.assert_array_equal(drafted.stopped, plain.stopped, err_msg="stopped")
    for name in ("law", "full"):
        if getattr(drafted, name) is not None:
            np.testing.assert_allclose(getattr(drafted, name), getattr(plain, name), atol=tolerance, err_msg=name)
