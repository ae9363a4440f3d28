"""Check that a test of a drafter has drafted at all."""

from collections.abc import Sequence

import numpy as np

from specjax.rollout.plan import RolloutConfig
from specjax.types import Rollout


def refuse_without_proposals(config: RolloutConfig, rollouts: Sequence[Rollout]) -> None:
    """Raise ValueError if `config` drafts but no token was proposed that could be emitted.

    A rollout function of your own need not count its proposals. Then nothing is raised.
    """
    counts = [int(np.sum(rollout.drafted)) for rollout in rollouts if rollout.drafted is not None]
    if max(config.lengths) and counts and not sum(counts):
        raise ValueError(
            f"draft_length = {max(config.lengths)}: nothing was drafted, so nothing is proven of the drafter; must be "
            "prompts at which it proposes something, or draft_length = 0"
        )
