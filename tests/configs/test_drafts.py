"""The kinds of drafts: which options each has, what a change of kind keeps, and runs that recorded others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.from_json import from_json, without_idle_options
from configs.override import override
from configs.schema import KINDS, DraftConfig, HeadConfig, LookupConfig, RunConfig, kind_of
from launch.cli.fields import fields_of
from launch.errors import ConfigError
from launch.run.directory import check_resumable
from tests.refusals import refuses

# The config.json of a run of `tiny` with `--draft.kind none --draft.lookup.kind ngram`, as of 29 November 2026.
RECORDED = Path(__file__).parent / "recorded_run.json"


def test_every_option_of_the_draft_section_is_read_with_some_kind():
    paths = {field.path.removeprefix("draft.") for field in fields_of(RunConfig) if field.path.startswith("draft.")}
    every = {option for kind in KINDS.values() for option in kind.options}
    own = {path for path in paths if not path.startswith(("lookup", "architecture."))} - {"kind"}
    assert every - {"architecture"} == own
    counts = {name: sum(kind.reads(f"draft.{path}") for path in own) for name, kind in KINDS.items()}
    assert counts == {"eagle3": 18, "dflash": 12, "dspark": 13, "mtp": 5, "model": 3, "none": 0}
    assert {option for option in every if not kind_of("my.drafts:build").reads(f"draft.{option}")} == {"rollout_dtype"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="none", intermediate_size=8), "intermediate_size = 8: must be None with kind none"),
        (dict(kind="mtp", head=HeadConfig(num_layers=2)), "head.num_layers = 2: must be None with kind mtp"),
        (dict(kind="dflash", head=HeadConfig(markov_rank=2)), "head.markov_rank = 2: must be 256 with kind dflash"),
        (dict(head=HeadConfig(block_size=2)), "head.block_size = 2: must be 7 with kind eagle3"),
        (dict(kind="my.drafts:build", rollout_dtype="int8"), "rollout_dtype = int8: must be None with kind my."),
    ],
)
def test_an_option_that_a_kind_does_not_read_is_refused(options: dict[str, Any], message: str):
    with refuses(message):
        DraftConfig(**options)


def test_a_draft_of_another_kind_keeps_what_both_read_alike():
    head = HeadConfig(fc_norm=True)
    draft = DraftConfig(vocab_size=9, intermediate_size=8, head=head, loss="kl", unroll=2, rollout_dtype="int8")
    assert draft.replaced(kind="eagle3", unroll=3) == replace(draft, unroll=3)
    sizes = dict(vocab_size=9, intermediate_size=8, loss="kl")
    assert draft.replaced(kind="dspark") == DraftConfig("dspark", rollout_dtype="int8", **sizes)
    assert draft.replaced(kind="mtp", unroll=4) == DraftConfig("mtp", loss="kl", rollout_dtype="int8", unroll=4)
    assert draft.replaced(kind="my.drafts:build") == DraftConfig("my.drafts:build", **sizes)
    assert draft.replaced(path="x") == replace(draft, path="x", vocab_size=None)
    run = RunConfig(name="own", steps=1, draft=draft)
    assert override(run, {"draft.kind": "none", "rollout.draft_length": 0}).draft == DraftConfig("none")


def test_the_shape_of_a_new_draft_has_what_is_set_and_what_makes_it_this_kind():
    sizes, flags = {"intermediate_size": 8, "draft_vocab_size": 9}, ("qk_norm", "norm_before_fc", "fc_norm")
    draft = DraftConfig(intermediate_size=8, vocab_size=9)
    assert draft.shape() == sizes | {
        **dict.fromkeys((*flags, "norm_before_residual", "norm_output"), False),
        "use_aux_hidden_state": True,
    }
    assert draft.replaced(kind="dflash").shape() == sizes | {"block_size": 7, "sample_from_anchor": False}
    heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    assert draft.replaced(kind="dspark").shape() == sizes | heads | {"block_size": 7, "markov_rank": 256}


def test_a_run_that_recorded_idle_options_goes_on(tmp_path: Path):
    record = json.loads(RECORDED.read_text())
    assert (record["draft"]["kind"], record["draft"]["intermediate_size"]) == ("none", 192)
    with refuses("draft.intermediate_size = 192: ...None...none"):
        from_json(RunConfig, record)
    config = from_json(RunConfig, without_idle_options(record))
    assert config.draft == DraftConfig("none", lookup=LookupConfig("ngram"))
    (tmp_path / "config.json").write_text(RECORDED.read_text())
    check_resumable(tmp_path, replace(config, resume=True))
    with refuses("draft.lookup.kind = history: ...ngram", ConfigError):
        check_resumable(tmp_path, override(config, {"resume": True, "draft.lookup.kind": "history"}))
    with refuses("draft.colour: is not an option", ValueError):
        from_json(RunConfig, without_idle_options(record | {"draft": {"kind": "none", "colour": "red"}}))
