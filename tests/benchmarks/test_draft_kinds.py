"""Arms of different kinds of drafts, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.draft_kinds import KindsArgs, count, draft_of, main, with_parameters
from configs import tiny
from launch.setup.experiment import build_experiment


def test_an_arm_is_a_kind_a_lookup_or_both():
    drafts = {arm: draft_of(arm, tiny.config, KindsArgs()) for arm in ("none", "history", "eagle3+history")}
    named = {arm: (draft.kind, draft.lookup.kind) for arm, draft in drafts.items()}
    assert named == {"none": ("none", "none"), "history": ("none", "history"), "eagle3+history": ("eagle3", "history")}


def test_a_block_draft_gets_as_many_parameters_as_the_recipes_draft():
    config, args = tiny.config, KindsArgs()
    total = count(build_experiment(config).networks.params.draft)
    draft = draft_of("dspark", config, args)
    experiment = build_experiment(replace(config, draft=with_parameters(draft, total, build_experiment(config))))
    # Widths are multiples of 8.
    assert experiment.networks.decoder is not None
    width = 8 * 3 * experiment.networks.decoder.hidden_size * args.layers
    assert abs(count(experiment.networks.params.draft) - total) <= width / 2
    with pytest.raises(ValueError, match="layers = 9, markov_rank = 16: must be smaller for .* 1,000"):
        with_parameters(replace(draft, head=replace(draft.head, num_layers=9)), 1000, experiment)


@pytest.mark.slow
def test_all_arms_take_the_same_steps_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--warmup.steps 2 --distill.steps 2 --distill.answers 24 --eval.prompts 8 --steps 3 --part 2 --problems 4"
    argv = ["tiny", "--arms", "dspark", "history", *options.split(), "--json", str(tmp_path / "kinds.json")]
    assert main(argv) == 0
    found = json.loads((tmp_path / "kinds.json").read_text())
    assert [set(turn) for turn in found["turns"]] == [{"none", "dspark", "history"}] * 3
    assert len(found["accepted"]["dspark"]) == 4 and found["accepted"]["none"] is None
    assert capsys.readouterr().out.count("dspark  ") == 3
