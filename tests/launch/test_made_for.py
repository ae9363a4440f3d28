"""The programs write `made_for.json` beside a draft, and read it again."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.acceptance.counts import DraftCounts
from launch.acceptance.held_out import HeldOutAcceptance
from launch.cli.options import parse_run
from launch.setup.draft import read_stated_policy
from launch.setup.drafts.base import Draft
from launch.setup.drafts.mtp import MTPDraft
from models.checkpoints.made_for import MadeFor, state_made_for
from models.drafts.mtp import MTPConfig, mtp_config
from specjax.drafters import NoDrafter
from tests.launch.programs import ONE_LAYER
from tests.refusals import refuses

POLICY = replace(ONE_LAYER, hidden_size=16, num_layers=2)
HEAD = mtp_config(POLICY, "mimo")


def test_it_is_read_where_the_draft_was(tmp_path: Path):
    by_name = {name: MadeFor(name, 16, 2, 1.0, 0.5) for name in ("draft", "policy")}
    for name, made_for in by_name.items():
        (tmp_path / name).mkdir()
        state_made_for(tmp_path / name, made_for)
    paths = ["--draft.path", str(tmp_path / "draft"), "--model.path", str(tmp_path / "policy")]
    config = parse_run(["gsm8k", *paths], "", "")

    def read(option: str | None, head: MTPConfig = HEAD) -> MadeFor | None:
        return read_stated_policy(MTPDraft(NoDrafter(), read_from=option, head=head), config)

    assert read("draft.path") == by_name["draft"]
    assert read("model.path") == by_name["policy"]
    assert read(None) is None
    wide = replace(HEAD, hidden_size=24)
    assert read_stated_policy(Draft(NoDrafter(), read_from="draft.path"), config) == by_name["draft"]
    message = "/draft...made_for.json...hidden_size = 16...24"
    with refuses(f"draft.path = ...{message}"):
        read("draft.path", wide)


@pytest.mark.parametrize(("temperature", "expected"), [(0.6, 0.75), (0.0, None)])
def test_no_acceptance_is_stated_for_greedy_answers(temperature: float, expected: float | None):
    """At temperature 0, a run predicts acceptance from the laws at temperature 1, which is not comparable."""
    counts = DraftCounts(0, 0, 0, 0, [], [], None, [])
    measured = HeldOutAcceptance(temperature, 3, 0.75, None, counts, {})
    assert measured.made_for("runs/tiny", POLICY) == MadeFor("runs/tiny", 16, 2, temperature, expected)
