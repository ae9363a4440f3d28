"""Faults in the checkpoints of policies, and runs that do not fit them."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from configs.schema import ArithmeticConfig, DataConfig, RolloutOptions, RunConfig
from configs.schema.networks import DraftConfig, ModelConfig
from launch.build.experiment import build_experiment
from launch.cli.errors import ConfigError
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.files import write_json
from models.hf.config import config_to_hf
from specjax.types import Policy, PyTree
from tests.refusals import refuses

SHAPE = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=15)
SMALL = DecoderConfig(**SHAPE, num_layers=1, max_positions=17)
# Prompts and completions of at most 10 + 7 = 17 tokens.
CONFIG = RunConfig(
    name="small",
    steps=1,
    model=ModelConfig(architecture=SMALL, dtype="float32"),
    draft=DraftConfig(kind="none"),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        held_out_count=4,
        arithmetic=ArithmeticConfig(problems=24, max_terms=4),
    ),
    rollout=RolloutOptions(group_size=2, max_new_tokens=7, draft_length=0),
)
LONGER = replace(CONFIG, rollout=replace(CONFIG.rollout, max_new_tokens=8))


def without_a_limit(model: ModelConfig, mesh: Mesh, key: jax.Array) -> tuple[Policy, PyTree]:
    del model, mesh
    return make_policy(SMALL), init_decoder(SMALL, key)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["architecture", "ours", "hugging face", "draft"])
def test_row_07_a_sequence_beyond_the_last_position_is_refused(tmp_path: Path, layout: str, training: bool) -> None:
    """Before weights are read: the directories hold none."""
    config, owner = LONGER, "model.architecture"
    if layout == "draft":
        long = ModelConfig(architecture=replace(SMALL, max_positions=18), dtype="float32")
        config, owner = replace(LONGER, model=long, draft=DraftConfig(kind="model", architecture=SMALL)), "draft.arch"
    elif layout != "architecture":
        write_json(tmp_path / "config.json", asdict(SMALL) if layout == "ours" else config_to_hf(SMALL))
        if layout == "ours":
            (tmp_path / "params").mkdir()
        config, owner = replace(LONGER, model=ModelConfig(path=str(tmp_path))), f"model.path = {tmp_path}"
    with refuses(f"data.max_prompt_tokens + rollout.max_new_tokens = 18: ...17...{owner}", ConfigError):
        build_experiment(config, training)


def test_row_07_the_last_position_may_be_used_and_a_family_states_no_limit() -> None:
    assert build_experiment(CONFIG).networks.decoder == replace(SMALL, feature_layers=())
    family = ModelConfig(family=f"{__name__}:without_a_limit", dtype="float32")
    assert build_experiment(replace(LONGER, model=family)).networks.decoder is None
