"""What a person is told of drafting."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from launch.build.drafts.base import Draft
from launch.build.drafts.eagle3 import Eagle3Draft
from launch.build.drafts.model import ModelDraft
from launch.build.drafts.mtp import MTPDraft
from launch.run.console import StepPrinter
from launch.run.draft_alerts import CAUSES, LEAST_ACCEPTANCE, DraftSwitches, slower_than_plain, wrongly_loaded
from launch.run.metric_log import STANDARD_METRICS
from launch.run.step_timer import Step
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import mtp_config
from specjax.cost import Acceptance, Drafting, Progress
from specjax.drafters import NoDrafter
from specjax.rollout.plan import Phase


def drafting(accepted: float) -> Drafting:
    """A round at draft length 2 costs 1.5 and 4 plain ones."""
    acceptance = Acceptance(jnp.full(2, 1e6), jnp.array([accepted, accepted / 2]) * 1e6, jnp.float32(0.72))
    none = jnp.zeros((2, 2))
    return Drafting(acceptance, Progress(none, none), jnp.array([[2.0, 3.0], [1.0, 4.0]]))


def switch(switches: DraftSwitches, step: int, lengths: list[int], drafting: Drafting, **metrics: Any) -> None:
    rollout: Any = SimpleNamespace(draft_length=jnp.array([lengths]))
    prompts: Any = None
    metrics = {name.replace("__", "/"): value for name, value in metrics.items()}
    switches(Step(step, 0.0, metrics, prompts, rollout, drafting))


def test_a_phase_that_stops_to_draft_and_begins_again_says_why() -> None:
    said: list[str] = []
    switches = DraftSwitches((Phase(8, 64), Phase(2, 96)), (0, 2), lambda step, line: said.append(line))
    switch(switches, 1, [2, 2], drafting(0.64))
    switch(switches, 2, [2, 2], drafting(0.64), perf__speedup_vs_autoregressive=jnp.float32(0.873))
    assert said == []
    switch(switches, 3, [2, 0], drafting(0.64))
    switch(switches, 4, [2, 0], drafting(0.64))
    switch(switches, 5, [0, 0], drafting(0.2))
    switch(switches, 6, [2, 0], drafting(0.8))
    assert [line[: line.index(". Draft length")] for line in said] == [
        "step 3: drafting turns off at 2 slots of 96 positions",
        "step 5: drafting turns off at 8 slots of 64 positions",
        "step 6: drafting turns on at 8 slots of 64 positions",
    ]
    assert said[0].endswith(
        "Draft length 2: alpha 1.96, 1.96 for the batch, at 4.00 times the cost of a round at 0; position 1 accepted "
        "0.64, predicted 0.72; promised speed 0.49, over all phases measured at step 2: 0.87"
    )
    assert "alpha 2.20" in said[2] and "at 1.50 times the cost" in said[2] and "promised speed 1.47" in said[2]


def test_a_switch_before_anything_was_measured() -> None:
    said: list[str] = []
    switches = DraftSwitches((Phase(8, 64), Phase(2, 96)), (0, 2), lambda step, line: said.append(line))
    fresh = replace(drafting(0), acceptance=Acceptance(jnp.zeros(2), jnp.zeros(2), jnp.float32(0.5)))
    for step, lengths in ((1, [0, 0]), (2, [2, 0])):
        switch(switches, step, lengths, fresh)
    (line,) = said
    assert "position 1 accepted -, predicted 0.50" in line and line.endswith("not measured yet")


def test_a_fixed_draft_length_that_loses_names_the_option_that_turns_it_off() -> None:
    assert slower_than_plain(1.0, 3) is None
    said = slower_than_plain(0.846, 3)
    assert said is not None and "0.85 times" in said and "--rollout.draft-lengths 0 3" in said


MADE_FOR = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)
LAYER = dict(hidden_size=16, intermediate_size=16, num_heads=1, num_kv_heads=1, head_dim=16)
POLICY = DecoderConfig(**LAYER, vocab_size=9, num_layers=8, feature_layers=(2, 4, 5))
HEAD = Eagle3Config(**LAYER, vocab_size=9, draft_vocab_size=9, feature_size=48)
NAMES: Any = dict(drafter=NoDrafter(), read_from="draft.path", made_for=MADE_FOR)
DRAFT = Eagle3Draft(**NAMES, head=HEAD, decoder=POLICY)


def test_a_draft_that_foresees_less_than_its_file_states_is_loud() -> None:
    assert wrongly_loaded(DRAFT, 0.65, 1.0) is None
    assert wrongly_loaded(DRAFT, 0.63, 1.0) == (
        "ALARM: the draft of draft.path has a predicted acceptance of 0.63 in the first step, where its file states "
        "0.74, measured with the policy runs/tiny. What is generated keeps its law. The usual causes: "
        + DRAFT.usual_causes
    )


@pytest.mark.parametrize(
    "draft", [MTPDraft(**NAMES, head=mtp_config(POLICY, "mimo")), ModelDraft(**NAMES, decoder=POLICY)]
)
def test_layers_and_rope_are_blamed_of_an_eagle3_head_alone(draft: Draft) -> None:
    said = wrongly_loaded(draft, 0.1, 1.0)
    assert said is not None and said.startswith("ALARM: the draft of draft.path has") and "policy" in said
    assert "layers" not in said and "rope" not in said


@pytest.mark.parametrize(
    "made_for", [None, MadeFor("runs/tiny", 16, 8, 0.6, 0.9), MadeFor("runs/tiny", 16, 8, 1.0, None)]
)
def test_where_nothing_is_stated_of_this_law_there_is_a_floor(made_for: MadeFor | None) -> None:
    draft = replace(DRAFT, made_for=made_for)
    assert wrongly_loaded(draft, LEAST_ACCEPTANCE, 1.0) is None
    said = wrongly_loaded(draft, LEAST_ACCEPTANCE - 0.01, 1.0)
    expected = "0.19 in the first step, where one that is not random comes to 0.2 and more, and nothing beside it"
    assert said is not None and expected in said


def test_what_a_head_was_made_with_is_said_where_it_differs() -> None:
    assert DRAFT.differences() is None
    other = replace(
        DRAFT,
        head=replace(HEAD, rope_theta=77.0, max_positions=2048),
        decoder=replace(POLICY, feature_layers=(1, 3, 4)),
        made_for=replace(MADE_FOR, num_layers=9),
    )
    assert other.differences() == (
        "the draft of draft.path was made with rope_theta = 77.0 (the policy's: 10000.0), max_positions = 2048 (the "
        "policy's: 32768), feature_layers = (1, 3, 4) (EAGLE-3's: (2, 4, 5)), a policy of num_layers = 9 (this "
        "policy's: 8); beyond 2048 positions it may be accepted less"
    )
    assert replace(other, read_from=None).differences() is None
    last = replace(HEAD, use_aux_hidden_state=False, feature_size=16)
    assert replace(DRAFT, head=last, decoder=replace(POLICY, feature_layers=())).differences() is None


def test_the_alarm_is_loud_once_and_stays_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    step = dict.fromkeys(STANDARD_METRICS) | {"draft/measured_acceptance": 0.123, "draft/promised_acceptance": 0.789}
    printed = StepPrinter(every=2)
    for number, alarm in enumerate((0, 1, 1, 1, None, 1), start=1):
        printed(number, step | {"draft/alarm": alarm})
    lines = capsys.readouterr().out.splitlines()
    loud = [line for line in lines if line.startswith("ALARM")]
    assert [line.split(":")[0] for line in loud] == ["ALARM at step 2", "ALARM at step 6"]
    assert "accepts 0.12 of its drafts" in loud[0] and "promises at least 0.79" in loud[0] and loud[0].endswith(CAUSES)
    assert [line.split()[0] for line in lines if line.endswith("draft alarm")] == ["2", "4", "6"]
