"""Alarms and notices about a run's draft, and its share of the time."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from launch.run.console import StepPrinter
from launch.run.draft_monitor import (
    LEAST_ACCEPTANCE,
    NOT_ACCEPTED,
    NOT_MEASURED,
    DraftShare,
    DraftSpeed,
    DraftSwitches,
    explain_choice,
    wrongly_loaded,
)
from launch.run.metric_log import STANDARD_METRICS
from launch.run.step_timer import DispatchedStep
from launch.setup.drafts.base import MORE_TRAINING
from launch.setup.drafts.eagle3 import Eagle3Draft
from launch.setup.drafts.model import ModelDraft
from launch.setup.drafts.mtp import MTPDraft
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import mtp_config
from specjax.cost import Acceptance, BatchProgress, Drafting, unmeasured
from specjax.drafters import NoDrafter
from specjax.rollout.plan import Phase, RolloutConfig
from tests.refusals import assert_refused

PHASES = Phase(8, 64), Phase(2, 96)


def drafting(accepted: float) -> Drafting:
    """Return statistics with this acceptance. A round at draft length 2 costs 1.5 or 4 plain rounds, by phase."""
    acceptance = Acceptance(jnp.full(2, 1e6), jnp.array([accepted, accepted / 2]) * 1e6, jnp.float32(0.72))
    none = jnp.zeros((2, 2))
    return Drafting(acceptance, BatchProgress(none, none), jnp.array([[2.0, 3.0], [1.0, 4.0]]))


def switch(switches: DraftSwitches, step: int, lengths: list[int], drafting: Drafting, **metrics: Any) -> None:
    rollout: Any = SimpleNamespace(draft_length=jnp.array([lengths]))
    prompts: Any = None
    metrics = {name.replace("__", "/"): value for name, value in metrics.items()}
    switches(DispatchedStep(step, 0.0, metrics, prompts, rollout, drafting))


def test_changes_of_a_phases_draft_length_are_explained() -> None:
    said: list[str] = []
    switches = DraftSwitches(PHASES, (0, 2), lambda step, line: said.append(line), lambda s: f"outlook {s}")
    fresh = replace(drafting(0), acceptance=Acceptance(jnp.zeros(2), jnp.zeros(2), jnp.float32(0.5)))
    switch(switches, 1, [0, 2], fresh)
    switch(switches, 2, [2, 2], fresh)
    switch(switches, 3, [2, 2], drafting(0.64), perf__speedup_vs_autoregressive=jnp.float32(0.873))
    switch(switches, 4, [2, 0], drafting(0.64))
    switch(switches, 5, [2, 0], drafting(0.64))
    switch(switches, 6, [0, 0], drafting(0.2))
    for step in range(7, 71):
        switch(switches, step, [0, 0], drafting(0.2), time__step=1.5)
    switched = ["step 2...on...8 slots of 64", "step 4...off...2 slots of 96", "step 6...off...8 slots of 64"]
    off = "drafting stays off...acceptance...0.20...speed-up 0.87...length 2...8 slots of 64...outlook 1.5"
    for line, expected in zip(said, [*switched, f"step 38: {off}", f"step 70: {off}"], strict=True):
        assert_refused(line, expected)
    for number in ("position 1 -", "predicted 0.50", "not measured yet"):
        assert number in said[0]
    numbers = (
        "acceptance length 1.96; a round replaces 1.96 rounds of the batch at draft length 0 and costs 4.00 times",
        "position 1 0.64",
        "predicted 0.72",
        "speed-up 0.49",
        "at step 3: 0.87",
    )
    for number in numbers:
        assert number in said[1]


def test_row_50_drafting_that_stays_off_from_the_start_is_said_once_acceptance_is_known() -> None:
    said: list[str] = []
    switches = DraftSwitches(PHASES, (0, 2), lambda step, line: said.append(line), lambda s: "outlook")
    unknown = replace(drafting(0), acceptance=Acceptance(jnp.zeros(2), jnp.zeros(2), jnp.float32(0)))
    switch(switches, 1, [0, 0], unknown, time__step=1.5)
    assert not said
    for step in (2, 3):
        switch(
            switches,
            step,
            [0, 0],
            replace(unknown, acceptance=replace(unknown.acceptance, predicted=jnp.float32(0.1))),
            time__step=1.5,
        )
    (line,) = said
    assert line.startswith("step 2: drafting stays off. Expected acceptance at position 1 0.10;")


def test_a_run_that_never_drafts_has_nothing_to_say_about_it() -> None:
    said: list[str] = []
    switches = DraftSwitches(PHASES, (0,), lambda step, line: said.append(line), lambda s: "outlook")
    nothing = replace(drafting(0), acceptance=Acceptance(jnp.zeros(0), jnp.zeros(0), jnp.float32(0)))
    for step in (1, 2, 30):
        switch(switches, step, [0, 0], nothing, time__step=1.5)
    assert not said


def test_without_measured_costs_their_absence_is_the_reason() -> None:
    said: list[str] = []
    switches = DraftSwitches(PHASES, (0, 2), lambda step, line: said.append(line), lambda s: "outlook")
    without = replace(drafting(0.1), seconds=jnp.array(unmeasured(2, (0, 2))))
    # Nothing is estimated from the first step of a process, also of one that resumes a run.
    switch(switches, 8, [0, 0], without, time__step=99.0)
    switch(switches, 9, [0, 0], without, time__step=1.5)
    assert said == [f"step 9: drafting stays off. Expected acceptance at position 1 0.10; {NOT_MEASURED}. outlook"]
    assert explain_choice(PHASES, (0, 2), without) == f"  draft length 0: {NOT_MEASURED}"


def test_a_choice_is_printed_with_its_reason() -> None:
    trips = jnp.array([[0, 1e6], [0, 0]])
    measured = replace(drafting(0.64), progress=BatchProgress(1.8 * trips, trips))
    first, second = explain_choice(PHASES, (0, 2), measured).splitlines()
    reason = (
        "acceptance length 1.96; a round replaces 1.80 rounds of the batch at draft length 0 and costs 1.50 times one"
    )
    speeds = "predicted speed by draft length 0: 1.00, 2: 1.20"
    assert first == f"  draft length 2 at 8 slots of 64 positions: {reason}; {speeds}"
    assert second.startswith(
        "  draft length 0 at 2 slots of 96 positions: acceptance length 1.00; a round replaces 1.00 rounds"
    )
    assert second.endswith("0: 1.00, 2: 0.49")


@pytest.mark.parametrize(
    ("speedups", "lengths", "warnings"),
    [
        ([0.85], (), []),
        ([0.85, 0.9], (), []),
        ([0.85, 0.9, 0.8, 0.9], (), [3]),
        ([0.85, 1.1, 0.8, 0.9], (), []),
        ([0.85, 0.9, 0.8], (0, 3), []),
    ],
    ids=["one probe", "two probes", "said once", "above 1 in one", "chosen lengths"],
)
def test_row_87_a_fixed_draft_length_that_loses_in_several_probes_names_the_option_that_turns_it_off(
    speedups: list[float], lengths: tuple[int, ...], warnings: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[int, str]] = []
    rollout = RolloutConfig(draft_length=3, draft_lengths=lengths)
    observe = DraftSpeed(rollout, lambda step, line: said.append((step, line)))
    nothing: Any = None
    for step, speedup in enumerate(speedups, start=1):
        metrics = {"perf/speedup_vs_autoregressive": speedup}
        observe(DispatchedStep(step, 0.0, metrics, nothing, nothing))
        observe(DispatchedStep(step, 0.0, {}, nothing, nothing))
    assert [step for step, _ in said] == warnings
    for _, line in said:
        assert "loses: 0.85x [0.80, 0.90] the speed of draft length 0 in the last 3 probes" in line
        assert "rollout.draft_lengths = (0, 3)" in line
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(speedups) - len(warnings)
    # One probe has no interval.
    assert printed[0] == "  generation: 0.85x the speed of draft length 0 in one probe"
    assert len(printed) == 1 or re.match(
        r"  generation: [\d.]+x \[0.85, [\d.]+\] the speed of draft length 0 in the last 2", printed[1]
    )


MADE_FOR = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)
LAYER = dict(hidden_size=16, intermediate_size=16, num_heads=1, num_kv_heads=1, head_dim=16)
POLICY = DecoderConfig(**LAYER, vocab_size=9, num_layers=8, feature_layers=(2, 4, 5))
HEAD = Eagle3Config(**LAYER, vocab_size=9, draft_vocab_size=9, feature_size=48)
NAMES: Any = dict(drafter=NoDrafter(), read_from="draft.path", made_for=MADE_FOR)
DRAFT = Eagle3Draft(**NAMES, head=HEAD, decoder=POLICY)


@pytest.mark.parametrize(
    "made_for, least, stated",
    [
        (MADE_FOR, 0.64, "made_for.json states 0.74, measured with the policy runs/tiny"),
        (None, LEAST_ACCEPTANCE, f"at least {LEAST_ACCEPTANCE}"),
        (replace(MADE_FOR, temperature=0.6), LEAST_ACCEPTANCE, f"at least {LEAST_ACCEPTANCE}"),
        (replace(MADE_FOR, predicted_acceptance=None), LEAST_ACCEPTANCE, f"at least {LEAST_ACCEPTANCE}"),
    ],
)
def test_a_draft_with_less_acceptance_than_stated_warns(made_for: MadeFor | None, least: float, stated: str) -> None:
    draft = replace(DRAFT, made_for=made_for)
    command = "python -m launch.diagnose tiny"
    assert wrongly_loaded(draft, least + 0.005, 1.0, command) is None
    said = wrongly_loaded(draft, least - 0.01, 1.0, command) or ""
    assert_refused(said, f"ALARM: ...draft.path...{least - 0.01:.2f}")
    assert stated in said and "another domain of prompts" in said and draft.usual_causes in said
    assert command in said and said.endswith(MORE_TRAINING)


def test_layers_and_rope_are_suggested_only_for_an_eagle3_head() -> None:
    others = MTPDraft(**NAMES, head=mtp_config(POLICY, "mimo")), ModelDraft(**NAMES, decoder=POLICY)
    for draft in (DRAFT, *others):
        assert ("layers" in draft.usual_causes) == ("rope" in draft.usual_causes) == (draft is DRAFT)


def test_differences_from_the_heads_policy_are_listed() -> None:
    assert DRAFT.differences() is None
    other = replace(
        DRAFT,
        head=replace(HEAD, rope_theta=77.0, max_positions=2048),
        decoder=replace(POLICY, feature_layers=(1, 3, 4)),
        made_for=replace(MADE_FOR, num_layers=9),
    )
    said = other.differences() or ""
    assert said.startswith("the draft of draft.path was made with ")
    for value, policys in (
        ("rope_theta = 77.0", "10000.0"),
        ("max_positions = 2048", "32768"),
        ("feature_layers = (1, 3, 4)", "(2, 4, 5)"),
        ("num_layers = 9", "8"),
    ):
        assert re.search(rf"{re.escape(value)} \([^:]+: {re.escape(policys)}\)", said), said
    assert replace(other, read_from=None).differences() is None
    last = replace(HEAD, use_aux_hidden_state=False, feature_size=16)
    assert replace(DRAFT, head=last, decoder=replace(POLICY, feature_layers=())).differences() is None


def test_the_alarm_is_explained_once_and_shown_on_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = dict.fromkeys(STANDARD_METRICS) | {"draft/measured_acceptance": 0.123, "draft/promised_acceptance": 0.789}
    printed = StepPrinter(every=2, directory=tmp_path)
    for number, alarm in enumerate((0, 1, 1, 1, None, 1), start=1):
        printed(number, step | {"draft/alarm": alarm})
    lines = capsys.readouterr().out.splitlines()
    loud = [line for line in lines if line.startswith("ALARM")]
    assert [line.split(":")[0] for line in loud] == ["ALARM at step 2", "ALARM at step 6"]
    assert "accepts 0.12 of its drafts" in loud[0] and "promises at least 0.79" in loud[0]
    command = f"python -m launch.diagnose {tmp_path} tells them apart"
    assert NOT_ACCEPTED.causes in loud[0] and loud[0].endswith(command)
    assert [line.split()[0] for line in lines if line.endswith("draft alarm")] == ["2", "4", "6"]


def test_the_share_is_the_time_that_steps_with_draft_training_take_longer() -> None:
    logged: list[Mapping[str, Any]] = []

    def log(step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        logged.append(metrics)
        return dict(metrics)

    share = DraftShare(log)
    share(1, {"draft/trained": 1, "time/step": 60.0})
    for step in range(2, 18):
        trained = step % 4 == 0
        share(step, {"draft/trained": int(trained), "time/step": 1.5 if trained else 1.0})
    share(18, {"draft/trained": 0, "time/step": 90.0, "time/generation": 80.0})
    # Needs steps of both kinds. The first step, which compiles, and probes do not count.
    assert [metrics["time/draft_training"] for metrics in logged[:3]] == [None] * 3
    trained = 5 / 18
    assert logged[-1]["time/draft_training"] == pytest.approx(trained * 0.5 / (1 + trained * 0.5))
    share(19, {"time/step": 1.0})
    assert "time/draft_training" not in logged[-1]
