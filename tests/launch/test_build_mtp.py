"""Runs whose draft is an MTP head, from the policy's checkpoint or with random weights."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from launch.cli.errors import ConfigError
from launch.cli.options import parse_run
from launch.setup.experiment import Experiment, build_experiment
from models.drafts.mtp import init_mtp, mtp_config
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.hf.save import save_policy
from models.params import init_params
from specjax.drafters import HeadDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import PyTree
from tests.launch.checkpoints import WORDS, write_tokenizer
from tests.launch.programs import Options, argv
from tests.refusals import refuses

MTP = {"--draft.kind": "mtp", "--model.feature-layers": "0"}


def run(options: Options) -> Experiment:
    return build_experiment(parse_run(argv("gsm8k", options), "", ""))


@pytest.fixture
def stitched(files: Path, tmp_path: Path) -> tuple[Path, PyTree]:
    """Return a policy with a head of MiMo's convention, and the head's parameters."""
    decoder, mesh = read_hf_config(files / "policy", ()), make_mesh(MeshConfig())
    config = mtp_config(decoder, "mimo")
    params = init_params(partial(init_mtp, config), jax.random.key(5), mesh)
    save_policy(tmp_path / "policy", load_policy(files / "policy", decoder, mesh), decoder, mtp=(config, params))
    write_tokenizer(tmp_path / "policy", WORDS)
    return tmp_path / "policy", params


def test_the_checkpoints_own_head_is_read(shrunk: Options, stitched: tuple[Path, PyTree]):
    directory, params = stitched
    networks = run(shrunk | MTP | {"--model.path": str(directory), "--draft.unroll": "2"}).networks
    assert networks.decoder.feature_layers == () and networks.draft.read_from == "model.path"
    assert isinstance(networks.drafter, HeadDrafter) and networks.drafter.unroll == 2
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, networks.params.draft, params)))


def test_a_head_from_random_weights(shrunk: Options, stitched: tuple[Path, PyTree]):
    """The head has random weights, even if the checkpoint holds a head."""
    networks = run(shrunk | MTP | {"--draft.mtp-convention": "deepseek_v3"}).networks
    assert networks.draft.read_from is None and networks.params.draft["head"]["kernel"].shape == (16, len(WORDS))
    directory, held = stitched
    fresh = {"--draft.mtp-convention": "mimo", "--model.path": str(directory)}
    networks = run(shrunk | MTP | fresh).networks
    assert networks.draft.read_from is None
    assert not np.array_equal(networks.params.draft["fc"]["kernel"], held["fc"]["kernel"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--draft.vocab-size": "4"}, "draft.vocab_size = 4:...None...mtp"),
        ({"--draft.path": "somewhere"}, "draft.path = somewhere:...None...mtp"),
        ({"--draft.mtp-convention": "glm"}, "draft.mtp_convention = glm: ...qwen3_next"),
        ({}, "draft.mtp_convention = None:...model.path...MTP"),
        ({"--draft.kind": "eagle3", "--draft.mtp-convention": "mimo"}, "draft.mtp_convention = mimo:...None"),
    ],
)
def test_options_that_an_mtp_head_does_not_allow(shrunk: Options, options: Options, message: str):
    with refuses(message, ConfigError):
        run(shrunk | MTP | options)
