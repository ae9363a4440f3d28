"""Alarms and notices about drafting: it is broken, it is slower than plain decoding, or it turns off or on."""

from collections.abc import Callable, Sequence

from launch.run.step_timer import DispatchedStep
from launch.setup.drafts.base import Draft
from specjax.cost import Drafting, acceptance_length, batch_gain, expected_speedup
from specjax.parallel import processes
from specjax.rollout.plan import Phase
from specjax.train.adaptation import ALARM_MARGIN, ALARM_PATIENCE

# Usual causes when the rollout accepts less than draft training promises.
CAUSES = (
    "features of the wrong layers, another rope base, features and tokens paired off by one, a shuffled draft "
    "vocabulary (d2t), stale draft weights in the rollout, a draft cache that is not repaired or starts late"
)

# Any trained draft that was loaded correctly has at least this predicted acceptance at position 1.
LEAST_ACCEPTANCE = 0.2
# The stated acceptance holds for the prompts that it was measured on. A head distilled on GSM8K, which stated 0.45, had
# 0.21 on short instructions.
OTHER_PROMPTS = "it was trained on another domain of prompts than this run's"


def wrongly_loaded(draft: Draft, predicted: float, temperature: float) -> str | None:
    """Return an alarm if a draft from a checkpoint has too low a predicted acceptance in the first step; else None.

    `draft/alarm` cannot detect this: it compares predicted with measured acceptance, and both are low. The threshold is
    the acceptance that `made_for.json` states for the same temperature, less a margin, or else `LEAST_ACCEPTANCE`.

    Args:
        predicted:   `draft/predicted_acceptance` of the first step.
        temperature: of the run's sampling law.
    """
    if draft.read_from is None:
        return None
    threshold = LEAST_ACCEPTANCE
    expected = f"a trained draft has at least {LEAST_ACCEPTANCE} (no value for this temperature is stated beside it)"
    made_for = draft.made_for
    if made_for is not None and made_for.temperature == temperature and made_for.predicted_acceptance is not None:
        threshold = max(made_for.predicted_acceptance - ALARM_MARGIN, 0.0)
        stated = made_for.predicted_acceptance
        expected = f"its made_for.json states {stated:.2f}, measured with the policy {made_for.policy}"
    # NaN if the step had no token to predict.
    if not predicted < threshold:
        return None
    return (
        f"ALARM: the draft of {draft.read_from} has a predicted acceptance of {predicted:.2f} in the first step; "
        f"{expected}. The output distribution is still exact. The usual causes: {OTHER_PROMPTS}, in which case "
        f"training or launch.distill mends it; or {draft.usual_causes}"
    )


def acceptance_alarm(step: int, measured: float | None, promised: float | None) -> str:
    """Return the line that is logged with `draft/alarm`. Acceptance rates are those at position 1.

    measured: in the rollout. promised: by draft training on the same tokens. None is shown as "-".
    """
    measured_text, promised_text = ("-" if rate is None else f"{rate:.2f}" for rate in (measured, promised))
    return (
        f"ALARM at step {step}: the rollout accepts {measured_text} of its drafts at position 1, but training on the "
        f"same tokens promises at least {promised_text}, for {ALARM_PATIENCE} steps in a row. The output distribution "
        f"is still exact, but drafting is broken. The usual causes: {CAUSES}"
    )


def slower_than_plain(speedup: float, draft_length: int) -> str | None:
    """Return a warning if a fixed draft length is slower than draft length 0 (speedup < 1); else None."""
    if speedup >= 1:
        return None
    return (
        f"  drafting loses: {speedup:.2f} times the speed of draft length 0; "
        f"--rollout.draft-lengths 0 {draft_length} drafts only when that is faster"
    )


class DraftSwitches:
    """Step observer that reports each phase in which drafting turns off or on, with the reason.

    say: called with the step and the line.
    """

    def __init__(self, phases: Sequence[Phase], draft_lengths: Sequence[int], say: Callable[[int, str], None]) -> None:
        self._phases, self._lengths, self._say = phases, draft_lengths, say
        self._previous: list[int] | None = None  # draft length by phase in the step before
        self._speedup = "not measured yet"

    def __call__(self, step: DispatchedStep) -> None:
        # A custom rollout function may not report its draft lengths.
        if step.drafting is None or step.rollout.draft_length is None:
            return
        # All shards run at the same draft lengths.
        lengths_by_shard, drafting = processes.fetch((step.rollout.draft_length, step.drafting))
        lengths = lengths_by_shard[0].tolist()
        for phase, (previous, current) in enumerate(zip(self._previous or lengths, lengths, strict=True)):
            if (previous == 0) != (current == 0):
                self._say(step.number, self._line(step.number, phase, previous, current, drafting))
        self._previous = lengths
        if (speedup := step.metrics.get("perf/speedup_vs_autoregressive")) is not None:
            self._speedup = f"measured at step {step.number}: {float(speedup):.2f}"

    def _line(self, step: int, phase: int, previous: int, current: int, drafting: Drafting) -> str:
        """Return the line about one phase. previous, current: its draft lengths, one of which is 0."""
        slots, window = self._phases[phase]
        k = max(previous, current)
        index, estimate = self._lengths.index(k), drafting.acceptance
        seconds, speedup = drafting.seconds[phase], expected_speedup(drafting, self._lengths)[phase]
        rate = f"{float(estimate.accepted[0] / estimate.drafted[0]):.2f}" if estimate.drafted[0] > 0 else "-"
        gain = float(batch_gain(drafting, self._lengths)[phase, index])
        length = float(acceptance_length(estimate, self._lengths)[index])
        return (
            f"step {step}: drafting turns {'on' if current else 'off'} at {slots} slots of {window} positions. "
            f"Draft length {k}: acceptance length {length:.2f}; a round replaces {gain:.2f} rounds of the batch at "
            f"draft length 0 and costs {float(seconds[index] / seconds[0]):.2f} times one at {self._lengths[0]}; "
            f"acceptance at position 1 {rate}, predicted {float(estimate.predicted):.2f}; predicted speed-up "
            f"{float(speedup[index]):.2f}, over all phases {self._speedup}"
        )
