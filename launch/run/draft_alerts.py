"""Alarms and notices about drafting: it is broken, it is slower than none, or it turns off or on, with the reason."""

from collections.abc import Callable, Sequence

import jax

from launch.build.drafts.base import Draft
from launch.run.step_timer import Step
from specjax.cost import Drafting, acceptance_length, batch_gain, expected_speedup
from specjax.rollout.plan import Phase
from specjax.train.adaptation import ALARM_MARGIN, ALARM_PATIENCE

CAUSES = (
    "features of the wrong layers, another rope base, features and tokens paired off by one, a shuffled draft "
    "vocabulary (d2t), stale draft weights in the rollout, a draft cache that is not repaired or starts late"
)

# A draft that is not random has at least this predicted acceptance, unless it was loaded wrongly.
LEAST_ACCEPTANCE = 0.2


def wrongly_loaded(draft: Draft, predicted: float, temperature: float) -> str | None:
    """Return an alarm if the draft was read from a checkpoint and predicts too little acceptance in the first step.

    `draft/alarm` cannot see this: it compares promised with measured acceptance, and both are low.

    predicted: `draft/predicted_acceptance` of the first step. temperature: of the run's sampling law.
    """
    if draft.read_from is None:
        return None
    made_for = draft.made_for
    same_law = made_for is not None and made_for.temperature == temperature
    stated = made_for.predicted_acceptance if made_for is not None and same_law else None
    least = LEAST_ACCEPTANCE if stated is None else max(stated - ALARM_MARGIN, 0.0)
    if predicted >= least:
        return None
    if stated is None or made_for is None:
        expected = f"a draft that is not random has at least {LEAST_ACCEPTANCE} (its files do not state its own value)"
    else:
        expected = f"its file states {stated:.2f}, measured with the policy {made_for.policy}"
    return (
        f"ALARM: the draft of {draft.read_from} has a predicted acceptance of {predicted:.2f} in the first step, where "
        f"{expected}. The output distribution is still exact. The usual causes: {draft.usual_causes}"
    )


def acceptance_alarm(step: int, measured: float | None, promised: float | None) -> str:
    """Return the line of `draft/alarm`: acceptance at position 1, measured in the rollout and promised by training."""
    numbers = ["-" if value is None else f"{value:.2f}" for value in (measured, promised)]
    return (
        f"ALARM at step {step}: the rollout accepts {numbers[0]} of its drafts at position 1, where training on the "
        f"same tokens promises at least {numbers[1]}, in {ALARM_PATIENCE} steps in a row. The output distribution is "
        f"still exact, but drafting is broken. The usual causes: {CAUSES}"
    )


def slower_than_plain(speedup: float, draft_length: int) -> str | None:
    """Return a warning if a fixed draft length was measured to be slower than draft length 0."""
    if speedup >= 1:
        return None
    return (
        f"  drafting loses: {speedup:.2f} times the speed of draft length 0; "
        f"--rollout.draft-lengths 0 {draft_length} turns it off where it does not pay"
    )


class DraftSwitches:
    """Observer of steps that reports, with the reason, in which phases drafting turns off or on."""

    def __init__(self, phases: Sequence[Phase], draft_lengths: Sequence[int], say: Callable[[int, str], None]) -> None:
        self._phases, self._lengths, self._say = phases, draft_lengths, say
        self._before: list[int] | None = None
        self._speedup = "not measured yet"

    def __call__(self, step: Step) -> None:
        # A custom rollout function may not report its draft lengths.
        if step.drafting is None or step.rollout.draft_length is None:
            return
        # All shards run at the same draft lengths.
        by_shard, drafting = jax.device_get((step.rollout.draft_length, step.drafting))
        lengths = by_shard[0].tolist()
        for number, (before, now) in enumerate(zip(self._before or lengths, lengths, strict=True)):
            if (before == 0) != (now == 0):
                self._say(step.number, self._line(step.number, number, before, now, drafting))
        self._before = lengths
        if (speedup := step.metrics.get("perf/speedup_vs_autoregressive")) is not None:
            self._speedup = f"measured at step {step.number}: {float(speedup):.2f}"

    def _line(self, step: int, number: int, before: int, now: int, drafting: Drafting) -> str:
        phase, k = self._phases[number], max(before, now)
        index, known = self._lengths.index(k), drafting.acceptance
        seconds, speed = drafting.seconds[number], expected_speedup(drafting, self._lengths)[number]
        rate = f"{float(known.accepted[0] / known.drafted[0]):.2f}" if known.drafted[0] > 0 else "-"
        gain = float(batch_gain(drafting, self._lengths)[number, index])
        length = float(acceptance_length(known, self._lengths)[index])
        return (
            f"step {step}: drafting turns {'on' if now else 'off'} at {phase.slots} slots of {phase.window} positions. "
            f"Draft length {k}: acceptance length {length:.2f}, {gain:.2f} for the batch, at "
            f"{float(seconds[index] / seconds[0]):.2f} times the cost of a round at {self._lengths[0]}; position "
            f"1 accepted {rate}, predicted {float(known.predicted):.2f}; predicted speed "
            f"{float(speed[index]):.2f}, over all phases {self._speedup}"
        )
