"""Faults in the checkpoints of policies, and runs that do not fit them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from configs.override import override
from configs.schema import DraftConfig, ModelConfig
from launch.errors import ConfigError
from launch.exports.conversion import ConvertArgs, convert
from launch.setup.experiment import build_experiment
from models.checkpoints.draft import load_draft_checkpoint, load_named_draft, save_draft_checkpoint, save_named_draft
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3
from models.drafts.mtp import init_mtp, mtp_config
from models.files import write_json
from models.hf.config import config_to_hf
from models.hf.drafts.mtp import load_mtp
from models.hf.drafts.reader import load_public_draft
from models.hf.load import load_policy
from models.hf.save import save_policy
from models.params import init_params
from specjax.checkpoint import Checkpointer
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.train.config import TrainConfig
from specjax.train.state import init_train_state
from specjax.types import Params, Policy, PyTree
from tests.launch.programs import ONE_LAYER, SMALLEST
from tests.models.eagle3_checkpoints import Public
from tests.refusals import refuses

SMALL = replace(ONE_LAYER, max_positions=17)
CONFIG = override(SMALLEST, {"model.architecture": SMALL, "draft.kind": "none", "rollout.draft_length": 0})
LONGER = replace(CONFIG, rollout=replace(CONFIG.rollout, max_new_tokens=8))


def without_a_limit(model: ModelConfig, mesh: Mesh, key: jax.Array) -> tuple[Policy, PyTree]:
    del model, mesh
    return make_policy(SMALL), init_decoder(SMALL, key)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["architecture", "hugging face", "draft"])
def test_row_07_a_sequence_beyond_the_last_position_is_refused(tmp_path: Path, layout: str, training: bool) -> None:
    """It is refused before weights are read: the directories hold none."""
    config, owner = LONGER, "model.architecture"
    if layout == "draft":
        long = ModelConfig(architecture=replace(SMALL, max_positions=18), dtype="float32")
        config, owner = replace(LONGER, model=long, draft=DraftConfig(kind="model", architecture=SMALL)), "draft.arch"
    elif layout != "architecture":
        write_json(tmp_path / "config.json", config_to_hf(SMALL))
        config, owner = replace(LONGER, model=ModelConfig(path=str(tmp_path))), f"model.path = {tmp_path}"
    with refuses(f"data.max_prompt_tokens + rollout.max_new_tokens = 18: ...17...{owner}", ConfigError):
        build_experiment(config, training)


@pytest.mark.parametrize("option", ["model.path", "draft.path", "source"])
def test_a_network_in_the_layout_of_earlier_versions_is_refused(tmp_path: Path, option: str) -> None:
    write_json(tmp_path / "config.json", asdict(SMALL))
    (tmp_path / "params").mkdir()
    with refuses(f"{tmp_path}: written by an earlier version; convert it with that version's launch.convert"):
        if option == "source":
            convert(ConvertArgs(tmp_path, tmp_path / "out"))
        elif option == "draft.path":
            build_experiment(replace(CONFIG, draft=DraftConfig(kind="model", path=str(tmp_path))))
        else:
            build_experiment(replace(CONFIG, model=ModelConfig(path=str(tmp_path))))


def test_row_07_the_last_position_may_be_used_and_a_family_states_no_limit() -> None:
    assert build_experiment(CONFIG).networks.decoder == replace(SMALL, feature_layers=())
    family = ModelConfig(family=f"{__name__}:without_a_limit", dtype="float32")
    assert build_experiment(replace(LONGER, model=family)).networks.decoder is None


ONE, EIGHT = make_mesh(MeshConfig()), make_mesh(MeshConfig(data=2, fsdp=4))
HEAD = mtp_config(SMALL, "mimo")


def drawn(init: Callable[[jax.Array], PyTree], bad: float) -> PyTree:
    """Return random parameters, the last of which holds one value `bad`."""
    leaves, tree = jax.tree.flatten(init_params(init, jax.random.key(0), ONE))
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(bad)
    return jax.tree.unflatten(tree, leaves)


def hugging_face(path: Path, bad: float) -> Callable[[], object]:
    save_policy(path, drawn(partial(init_decoder, SMALL), bad), SMALL)
    return lambda: load_policy(path, SMALL, EIGHT)


def draft_of_ours(path: Path, bad: float) -> Callable[[], object]:
    config = load_public_draft(public_head(path / "public"), ONE).config
    save_draft_checkpoint(path / "draft", drawn(partial(init_eagle3, config), bad), config, None, ())
    return lambda: load_draft_checkpoint(path / "draft", EIGHT)


def named_draft(path: Path, bad: float) -> Callable[[], object]:
    params = {"a": jnp.ones(3), "b": jnp.array([1.0, bad])}
    save_named_draft(path, "package:name", params)
    return lambda: load_named_draft(path, "package:name", jax.device_put(params, ONE.devices.item()))


def public_head(path: Path, **changes: np.ndarray) -> Path:
    Public(ids=None).write(path, **changes)
    return path


def eagle3(path: Path, bad: float) -> Callable[[], object]:
    public_head(path, **{"norm.weight": np.array([1.0] * 11 + [bad], np.float32)})
    return lambda: load_public_draft(path, EIGHT)


def mtp(path: Path, bad: float) -> Callable[[], object]:
    save_policy(path, drawn(partial(init_decoder, SMALL), 1.0), SMALL, mtp=(HEAD, drawn(partial(init_mtp, HEAD), bad)))
    return lambda: load_mtp(path, SMALL, EIGHT)


def run_read_as(read: str) -> Callable[[Path, float], Callable[[], object]]:
    def write(path: Path, bad: float) -> Callable[[], object]:
        state = init_train_state(Params(drawn(partial(init_decoder, SMALL), bad), {}), TrainConfig(), ONE)
        with Checkpointer(path, 1) as saves:
            saves.save(1, state, {}, {})
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        like = {"restore": abstract, "restore_params": abstract.params, "restore_policy": abstract.params.policy}

        def load() -> None:
            with Checkpointer(path, 1) as saves:
                getattr(saves, read)(like[read])

        return load

    return write


SOURCES = {
    "hugging face": (hugging_face, "model.norm.weight: 1 of 8"),
    "draft of ours": (draft_of_ours, "1 of "),
    "named draft": (named_draft, "b: 1 of 2"),
    "eagle3": (eagle3, "norm.weight: 1 of 12"),
    "mtp": (mtp, "1 of "),
    "run resumed": (run_read_as("restore"), "params.policy.norm.scale: 1 of 8"),
    "run": (run_read_as("restore_params"), "params.policy.norm.scale: 1 of 8"),
    "policy of a run": (run_read_as("restore_policy"), "params.policy.norm.scale: 1 of 8"),
}


@pytest.mark.parametrize(("name", "bad"), [*((name, np.nan) for name in SOURCES), ("named draft", -np.inf)])
def test_row_10_a_parameter_that_is_not_finite_is_refused(tmp_path: Path, name: str, bad: float) -> None:
    write, expected = SOURCES[name]
    load = write(tmp_path / "bad", bad)
    with refuses(f"{tmp_path / 'bad'}...{expected}...nan or inf"):
        load()
    write(tmp_path / "good", 1.0)()


def broken_family(model: ModelConfig, mesh: Mesh, key: jax.Array) -> tuple[Policy, PyTree]:
    policy, weights = without_a_limit(model, mesh, key)
    return policy, jax.tree.map(lambda x: x * jnp.inf, weights)


def test_row_10_parameters_of_a_family_are_checked() -> None:
    family = f"{__name__}:broken_family"
    with refuses(f"model.family = {family}: ...nan or inf", ConfigError):
        build_experiment(replace(CONFIG, model=ModelConfig(family=family, dtype="float32")))
