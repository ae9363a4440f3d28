"""That a proof of a drafter is one."""

from collections.abc import Sequence

import numpy as np

from specjax.rollout.plan import RolloutConfig
from specjax.types import Rollout


def refuse_without_proposals(config: RolloutConfig, rollouts: Sequence[Rollout]) -> None:
    """Raises ValueError where `config` drafts and no token was proposed that could be emitted.

    A rollout function of one's own need not count its proposals: then nothing is refused.
    """
    counts = [int(np.sum(rollout.drafted)) for rollout in rollouts if rollout.drafted is not None]
    if max(config.lengths) and counts and not sum(counts):
        raise ValueError(
            f"draft_length = {max(config.lengths)}: nothing was drafted, so nothing is proven of the drafter; must be "
            "prompts at which it proposes something, or draft_length = 0"
        )
