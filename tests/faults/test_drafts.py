"""Faults in the checkpoints of drafts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.override import override
from launch.acceptance.held_out import AcceptanceMeter, HeldOutAcceptance
from launch.run.start import held_out_evaluator
from launch.setup.experiment import build_experiment
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.reader import draft_from_public, load_public_draft
from specjax.keys import SeedStep
from specjax.rollout.make_generate import GenerateProgram
from specjax.types import Params, Prompts, Rollout
from tests.launch.programs import SMALLEST
from tests.models.eagle3_checkpoints import ONE, VOCAB, Public
from tests.models.test_block_files import PUBLIC as BLOCKS
from tests.refusals import refuses


@pytest.mark.parametrize("size", [1, VOCAB - 1])
@pytest.mark.parametrize("dialect", ["specforge", "speculators"])
def test_row_04_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path, dialect: Dialect, size: int) -> None:
    public = Public(dialect=dialect, ids=tuple(range(size)))
    public.write(tmp_path / "whole")
    np.testing.assert_array_equal(load_public_draft(tmp_path / "whole", ONE).target_ids, np.arange(size))
    public.write(tmp_path / "none", d2t=None, t2d=None)
    with refuses(f"none: d2t: ...{size} out of {VOCAB}"):
        load_public_draft(tmp_path / "none", ONE)
    public.write(tmp_path / "flags", d2t=None)
    with refuses("flags: t2d: "):
        load_public_draft(tmp_path / "flags", ONE)
    replace(public, ids=None).write(tmp_path / "all")
    assert load_public_draft(tmp_path / "all", ONE).target_ids is None


INNER = {"mask_token_id": 16, "target_layer_ids": [0, 1]}
LAYER = BLOCKS["speculators"].fields["transformer_layer_config"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("zlab", {"dflash_config": INNER | {"block_size": 16}}, "dflash_config.block_size = 16: ...block_size = 4"),
        (
            "zlab",
            {"layer_types": 2 * ["sliding_attention"], "is_causal": True, "dflash_config": INNER | {"causal": False}},
            "dflash_config.causal = false: contradicts is_causal = true",
        ),
        ("speculators", {"target_hidden_size": 16}, "target_hidden_size = 16: contradicts hidden_size = 12"),
        (
            "speculators",
            {"speculators_config": {"algorithm": "dflash"}},
            'speculators_config.algorithm = "dflash": contradicts speculators_model_type = "dspark"',
        ),
        (
            "speculators",
            {"transformer_layer_config": LAYER | {"dtype": "float32", "torch_dtype": "bfloat16"}},
            'dtype = "float32": contradicts torch_dtype = "bfloat16"',
        ),
        (
            "speculators",
            {"torch_dtype": "float32", "transformer_layer_config": LAYER | {"dtype": "bfloat16"}},
            'torch_dtype = "float32": contradicts transformer_layer_config.dtype = "bfloat16"',
        ),
        (
            "speculators",
            {"architectures": ["DFlashSpeculator"]},
            'architectures = "DFlashSpeculator": contradicts speculators_model_type = "dspark"',
        ),
    ],
)
def test_row_72_a_block_draft_that_contradicts_itself_is_refused(name: str, changes: dict, message: str) -> None:
    draft_from_public(BLOCKS[name].fields)
    with refuses(message):
        draft_from_public(BLOCKS[name].fields | changes)


def test_row_72_a_draft_has_the_dtype_that_its_file_states() -> None:
    fields = BLOCKS["speculators"].fields
    assert draft_from_public(fields | {"dtype": "bfloat16"})[0].param_dtype == "bfloat16"


def test_row_72_a_head_that_contradicts_itself_is_refused() -> None:
    fields = Public(dialect="speculators").fields()
    draft_from_public(fields | {"target_hidden_size": 12})
    with refuses("target_hidden_size = 16: contradicts hidden_size = 12"):
        draft_from_public(fields | {"target_hidden_size": 16})
    with refuses('speculators_config.algorithm = "dflash": contradicts speculators_model_type = "eagle3"'):
        draft_from_public(fields | {"speculators_config": {"algorithm": "dflash"}})


SMALL = {"model.architecture.feature_layers": (0,), "draft.intermediate_size": 8, "data.held_out_count": 8}
RUN = override(SMALLEST, SMALL | {"eval.prompts": 7})


def test_row_29_acceptance_is_measured_on_no_more_sequences_than_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def measure(prompts: int) -> HeldOutAcceptance:
        """Return the measured acceptance in a run with `prompts` prompts per step."""
        sizes.clear()
        experiment = build_experiment(override(RUN, {"data.prompts": prompts}))
        params = experiment.networks.params
        return AcceptanceMeter(experiment, experiment.networks.drafter, params, 1.0).measure(params)

    generate = GenerateProgram.__call__

    def counting(program: GenerateProgram, params: Params, prompts: Prompts, noise: SeedStep) -> Rollout:
        sizes.append(len(prompts.id))
        return generate(program, params, prompts, noise)

    monkeypatch.setattr(GenerateProgram, "__call__", counting)
    cut = measure(prompts=1)
    assert sizes == [2, 2, 2, 2]
    whole = measure(prompts=4)
    assert sizes == [7] and whole.counts.sequences == 7
    assert replace(cut, predicted=None, untrained=None) == replace(whole, predicted=None, untrained=None)
    assert cut.predicted == pytest.approx(whole.predicted, abs=1e-5) == cut.untrained


@pytest.mark.parametrize(("prompts", "samples", "sizes"), [(1, 1, [2, 2, 2, 2]), (1, 8, [1] * 7), (4, 1, [7])])
def test_row_29_evaluation_takes_no_more_sequences_at_a_time_than_a_step_has(
    monkeypatch: pytest.MonkeyPatch, prompts: int, samples: int, sizes: list[int]
) -> None:
    monkeypatch.setattr("launch.run.start.Evaluate", lambda experiment, reward_fn, batches: lambda _: batches)
    experiment = build_experiment(override(RUN, {"data.prompts": prompts, "eval.samples": samples}))
    batches = held_out_evaluator(experiment, lambda *_: None)(None)  # pyright: ignore[reportArgumentType]
    assert [len(batch.id) for batch in batches] == sizes  # pyright: ignore[reportGeneralTypeIssues]
