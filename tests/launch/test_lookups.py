"""Lookups and small models built from a run's configuration, and the use of a run's memory for other prompts."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import launch.evaluation.sampler
from configs.schema import ArithmeticConfig, DataConfig, RolloutOptions, RunConfig
from configs.schema.networks import DraftConfig, LookupConfig, ModelConfig
from launch.cli.errors import ConfigError
from launch.setup.experiment import build_experiment
from launch.setup.networks import Networks
from models.config import DecoderConfig
from specjax.drafters import EitherDrafter, HeadDrafter, HistoryDrafter, ModelDrafter, NGramDrafter
from specjax.types import Params
from tests.refusals import refuses

SHAPE = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8)
SMALL = DecoderConfig(vocab_size=15, num_layers=1, **SHAPE)
CONFIG = RunConfig(
    name="lookups",
    steps=1,
    model=ModelConfig(architecture=replace(SMALL, num_layers=3, feature_layers=(0, 1, 2)), dtype="float32"),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        held_out_count=4,
        arithmetic=ArithmeticConfig(problems=24, max_terms=4),
    ),
    rollout=RolloutOptions(group_size=2, max_new_tokens=7, draft_length=2),
)


def networks(draft: DraftConfig, training: bool = True) -> Networks:
    return build_experiment(replace(CONFIG, draft=draft), training).networks


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


def test_a_small_model_starts_from_scratch_or_from_a_checkpoint(tmp_path: Path):
    drawn = networks(DraftConfig(kind="model", architecture=SMALL))
    assert isinstance(drawn.drafter, ModelDrafter) and drawn.drafter.model.vocab_size == 15
    drawn.draft.check_writable()
    drawn.draft.write(tmp_path / "small", drawn.params.draft)
    loaded = networks(DraftConfig(kind="model", path=str(tmp_path / "small"), loss="kl"))
    assert loaded.drafter.objective == "kl"
    jax.tree.map(np.testing.assert_array_equal, loaded.params.draft, drawn.params.draft)


def test_a_small_model_of_no_known_family_cannot_be_written(monkeypatch: pytest.MonkeyPatch):
    odd = networks(DraftConfig(kind="model", architecture=replace(SMALL, qk_norm=True, qkv_bias=True))).draft
    with refuses("draft.kind = model: its network cannot be written: qk_norm = True, qkv_bias = True:", ConfigError):
        odd.check_writable()
    small = networks(DraftConfig(kind="model", architecture=SMALL)).draft
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with refuses("draft.kind = model: ...pip install 'specjax[hf]'", ConfigError):
        small.check_writable()


@pytest.mark.parametrize(
    "draft, message",
    [
        (dict(kind="model", path="nowhere"), "draft.path = nowhere:...config.json"),
        (dict(kind="model", architecture=replace(SMALL, vocab_size=16)), "...its vocab_size is 16...15"),
        (dict(kind="model", architecture=replace(SMALL, max_positions=16)), "...= 17: ...16...draft.architecture"),
    ],
)
def test_models_that_do_not_fit_are_refused(draft: dict, message: str):
    with refuses(message, ConfigError):
        networks(DraftConfig(**draft))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DraftConfig(kind="model"), "path = None:"),
        (lambda: DraftConfig(kind="model", architecture=SMALL, path="x"), "path = x:"),
        (lambda: DraftConfig(kind="model", path="x", unroll=2), "unroll = 2:...3"),
        (lambda: DraftConfig(kind="model", path="x", decay=0.5), "decay = 0.5:...0.8"),
        (lambda: DraftConfig(kind="none", vocab_size=9), "vocab_size = 9:...None"),
        (lambda: DraftConfig(architecture=SMALL), "architecture:...None...eagle3"),
        (lambda: LookupConfig(min_n=9), "min_n = 9:...max_n = 8"),
        (lambda: LookupConfig(kept=0), "kept = 0:...1"),
        (lambda: LookupConfig(factor=-1.0), "factor = -1.0:...0"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(make, message: str):
    with refuses(message):
        make()


def test_a_recipe_with_a_draft_width_also_runs_without_a_draft():
    assert DraftConfig(kind="none", intermediate_size=192, unroll=4).kind == "none"


def test_prompts_that_are_held_out_see_no_memory(monkeypatch: pytest.MonkeyPatch):
    """Their ids belong to other prompts in training."""
    seen = []

    class Enough(Exception):
        pass

    def watched(*args, **kwargs):
        def generate(params: Params, *rest):
            seen.append(params)
            raise Enough

        return generate

    experiment = build_experiment(
        replace(
            CONFIG,
            draft=DraftConfig(kind="none", lookup=LookupConfig(kind="history")),
        )
    )
    params, prompts = experiment.networks.params, experiment.held_out_prompts.batch(np.arange(2))
    monkeypatch.setattr(launch.evaluation.sampler, "make_generate", watched)
    evaluate = launch.evaluation.sampler.make_evaluate(experiment, lambda *_: None, [prompts])
    with pytest.raises(Enough):
        evaluate(params)
    assert [len(params.memory) for params in seen] == [0] and len(params.memory) == len(experiment.problems.train)
