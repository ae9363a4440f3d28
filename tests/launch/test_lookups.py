"""Lookups and small models built from a run's configuration, and the use of a run's memory for other prompts."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch.evaluation.sampler
from configs.override import override
from configs.schema import DraftConfig, LookupConfig
from launch.errors import ConfigError
from launch.setup.experiment import build_experiment
from launch.setup.networks import Networks
from launch.setup.state import fresh_state
from specjax.drafters import EitherDrafter, HeadDrafter, HistoryDrafter, ModelDrafter, NGramDrafter
from specjax.types import Params
from tests.launch.programs import ONE_LAYER, SMALLEST
from tests.refusals import refuses

DEEPER = replace(ONE_LAYER, num_layers=3, feature_layers=(0, 1, 2))
CONFIG = override(SMALLEST, {"model.architecture": DEEPER})


def networks(draft: DraftConfig, training: bool = True) -> Networks:
    return build_experiment(replace(CONFIG, draft=draft), training).networks


def model_draft(**options: Any) -> Networks:
    return networks(DraftConfig(kind="model", **options))


def test_a_lookup_is_the_drafter_or_is_combined_with_it():
    alone = networks(DraftConfig(kind="none", lookup=LookupConfig(kind="ngram", min_n=2, max_n=5)))
    assert alone.drafter == NGramDrafter(15, min_n=2, max_n=5)
    assert alone.params.draft == {} and alone.params.memory == ()
    lookup = LookupConfig(kind="history", kept=2, factor=2.0, offset=1)
    experiment = build_experiment(replace(CONFIG, draft=DraftConfig(vocab_size=9, lookup=lookup)))
    both, vocabulary = experiment.networks, experiment.draft_vocabulary
    assert isinstance(both.drafter, EitherDrafter) and isinstance(both.drafter.trained, HeadDrafter)
    assert both.drafter.lookup == HistoryDrafter(15, kept=2, siblings=2, factor=2.0, offset=1)
    assert both.params.draft and vocabulary is not None and len(vocabulary) == 9


def test_history_has_memory_for_every_training_problem_that_is_read():
    draft = DraftConfig(kind="none", lookup=LookupConfig(kind="history", kept=2))
    experiment = build_experiment(replace(CONFIG, draft=draft))
    memory = experiment.networks.params.memory
    assert memory.shape == (len(experiment.problems.train), 2, 7) and not np.asarray(memory).any()
    assert memory.sharding.is_fully_replicated
    assert max(experiment.train_prompts.ids) < len(memory)
    assert networks(draft, training=False).params.memory == ()


@pytest.fixture(scope="module")
def drawn() -> Networks:
    """Return networks with a small model of random weights as the draft."""
    return model_draft(architecture=ONE_LAYER)


def test_a_small_model_starts_from_scratch_or_from_a_checkpoint(drawn: Networks, tmp_path: Path):
    assert isinstance(drawn.drafter, ModelDrafter) and drawn.drafter.model.vocab_size == 15
    drawn.draft.check_writable()
    drawn.draft.write(tmp_path / "small", drawn.params.draft)
    loaded = model_draft(path=str(tmp_path / "small"), loss="kl")
    assert loaded.drafter.objective == "kl"
    jax.tree.map(np.testing.assert_array_equal, loaded.params.draft, drawn.params.draft)


def test_a_small_model_of_no_known_family_cannot_be_written(drawn: Networks, monkeypatch: pytest.MonkeyPatch):
    odd = model_draft(architecture=replace(ONE_LAYER, qk_norm=True, qkv_bias=True)).draft
    with refuses("draft.kind = model: its network cannot be written: qk_norm = True, qkv_bias = True:", ConfigError):
        odd.check_writable()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with refuses("draft.kind = model: ...pip install -e '.[hf]' in a clone", ConfigError):
        drawn.draft.check_writable()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DraftConfig(kind="model"), "path = None:"),
        (lambda: DraftConfig(kind="model", architecture=ONE_LAYER, path="x"), "path = x:"),
        (lambda: DraftConfig(kind="model", path="x", unroll=2), "unroll = 2:...3"),
        (lambda: DraftConfig(kind="model", path="x", decay=0.5), "decay = 0.5:...0.8"),
        (lambda: DraftConfig(kind="none", vocab_size=9), "vocab_size = 9:...None"),
        (lambda: DraftConfig(architecture=ONE_LAYER), "architecture = ...None...eagle3"),
        (lambda: LookupConfig(min_n=9), "min_n = 9:...max_n = 8"),
        (lambda: model_draft(path="nowhere"), "draft.path = nowhere:...config.json"),
        (lambda: model_draft(architecture=replace(ONE_LAYER, vocab_size=16)), "...its vocab_size is 16...15"),
        (lambda: model_draft(architecture=replace(ONE_LAYER, max_positions=16)), "...= 17: ...16...draft.architecture"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(make: Callable[[], object], message: str):
    with refuses(message, (ValueError, ConfigError)):
        make()


def test_prompts_that_are_held_out_see_no_memory(monkeypatch: pytest.MonkeyPatch):
    """Their ids belong to other prompts in training."""

    class Seen(Exception):
        pass

    def generate(params: Params, *rest: object) -> None:
        raise Seen(params.memory)

    draft = DraftConfig(kind="none", lookup=LookupConfig(kind="history"))
    experiment = build_experiment(replace(CONFIG, draft=draft))
    params, prompts = experiment.networks.params, experiment.held_out_prompts.batch(np.arange(2))
    monkeypatch.setattr(launch.evaluation.sampler, "make_generate", lambda *_: generate)
    evaluate = launch.evaluation.sampler.Evaluate(experiment, lambda *_: None, [prompts])
    with pytest.raises(Seen) as seen:
        evaluate(fresh_state(experiment, params, None))
    assert seen.value.args == ((),) and len(params.memory) == len(experiment.problems.train)
