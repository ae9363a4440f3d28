"""`coupled` float32 rollouts of the default job's networks, token for token as they were at commit 6199db7."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.cli.options import load_recipe
from launch.setup.experiment import Experiment, build_experiment
from specjax.drafters import Drafter, NGramDrafter, NoDrafter
from specjax.keys import seed_step
from specjax.rollout.make_generate import make_generate
from specjax.types import Params

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tiny_coupled.json").read_text())
DRAFT_LENGTH = {"none": 0, "eagle3": 4, "ngram": 4}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    recipe = load_recipe("tiny")
    return build_experiment(replace(recipe, model=replace(recipe.model, dtype="float32")))


@pytest.mark.parametrize("kind", DRAFT_LENGTH)
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_tokens_equal_the_recorded_ones(experiment: Experiment, kind: str, temperature: float):
    """Tokens are the same with every drafter, and must not change with the code."""
    networks, base = experiment.networks, experiment.config.rollout
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "eagle3": networks.drafter,
        "ngram": NGramDrafter(networks.decoder.vocab_size, min_n=2, max_n=4),
    }
    law = replace(base.law, temperature=temperature)
    config = replace(base, verifier="coupled", draft_length=DRAFT_LENGTH[kind], law=law)
    params = networks.params if kind == "eagle3" else Params(networks.params.policy, {})
    generate = make_generate(networks.policy, drafters[kind], config, experiment.mesh)
    prompts = experiment.train_prompts.batch(np.arange(4))
    for step in (0, 1):
        rollout = generate(params, prompts, seed_step(experiment.config.seed, step))
        rows = zip(np.asarray(rollout.tokens), np.asarray(rollout.lengths), strict=True)
        tokens = [" ".join(map(str, row[:length])) for row, length in rows]
        assert tokens == GOLDEN[f"{temperature} {step}"]
        if kind != "none":
            assert np.sum(rollout.accepted) > 0
