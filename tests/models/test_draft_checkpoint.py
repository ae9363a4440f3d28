import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from models.checkpoints.draft import load_draft_checkpoint, save_draft_checkpoint
from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.files import read_json, write_json
from models.params import by_path, init_params
from models.rope import Llama3Scaling
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import PyTree
from tests.refusals import refuses

SHAPE = dict(hidden_size=16, num_kv_heads=2, head_dim=8, vocab_size=64)
KINDS = dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32), sliding_window=5, fc_norm=True, param_dtype="bfloat16")
CONFIG = Eagle3Config(**SHAPE, **KINDS, intermediate_size=24, num_heads=4, draft_vocab_size=6, feature_size=48)
IDS, LAYERS = np.array([0, 3, 4, 9, 40, 63], np.int32), (1, 2, 5)
ONE, EIGHT = make_mesh(MeshConfig()), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.fixture(scope="module")
def params() -> PyTree:
    return init_params(partial(init_eagle3, CONFIG), jax.random.key(0), ONE)


def test_there_and_back(tmp_path: Path, params: PyTree):
    params = {**params, "norm": jax.tree.map(lambda x: x.astype("float32"), params["norm"])}
    save_draft_checkpoint(tmp_path / "draft", params, CONFIG, IDS, LAYERS)
    assert read_json(tmp_path / "draft" / "config.json")["kind"] == "eagle3"
    config, loaded, ids, layers = load_draft_checkpoint(tmp_path / "draft", EIGHT)
    assert (config, layers) == (CONFIG, LAYERS)
    assert ids is not None and ids.dtype == np.int32
    np.testing.assert_array_equal(ids, IDS)
    found, expected = by_path(loaded), by_path(params)
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert x.dtype == expected[path].dtype and len(x.sharding.device_set) == 8
        np.testing.assert_array_equal(x, expected[path])
    with refuses("draft:...empty"):
        save_draft_checkpoint(tmp_path / "draft", params, CONFIG, IDS, LAYERS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[[0, 2, 1, 3, 4, 5]], "target_ids:"),
        (IDS[[0, 1, 2, 3, 4, 4]], "target_ids:"),
        (IDS[:5], "target_ids:...(5,)...(6,)"),
        (IDS + 1, "target_ids:...1...64...0...63"),
        (IDS - 1, "target_ids:...-1...62...0...63"),
        (None, "target_ids = None: "),
    ],
)
def test_invalid_ids_are_refused(tmp_path: Path, params: PyTree, ids: np.ndarray | None, message: str):
    with refuses(message):
        save_draft_checkpoint(tmp_path / "draft", params, CONFIG, ids, LAYERS)
    assert not (tmp_path / "draft").exists()


def test_broken_checkpoints(tmp_path: Path, params: PyTree):
    draft = tmp_path / "draft"
    save_draft_checkpoint(draft, params, CONFIG, IDS, LAYERS)
    fields = read_json(draft / "config.json")

    def refused(message: str) -> None:
        with refuses(message):
            load_draft_checkpoint(draft, ONE)

    head = fields["head"]
    for changed, message in [
        ({"kind": "mtp"}, "config.json: kind = mtp: ...eagle3"),
        ({"colour": "red"}, "config.json: ...kind...head...feature_layers"),
        ({"head": {**head, "colour": "red"}}, "config.json: ...colour"),
        ({"head": {name: value for name, value in head.items() if name != "head_dim"}}, "config.json: ...head_dim"),
        ({"head": {**head, "norm_before_fc": True}}, "config.json: norm_before_fc = True: ...False"),
        ({"head": {**head, "num_layers": 2}}, "params: ...config.json"),
        ({"head": {**head, "draft_vocab_size": 5}}, "target_ids: ...(6,)...(5,)"),
    ]:
        write_json(draft / "config.json", {**fields, **changed})
        refused(message)
    write_json(draft / "config.json", fields)
    (draft / "target_ids.npy").write_bytes(b"ids")
    refused("target_ids.npy: ")
    (draft / "target_ids.npy").unlink()
    refused("target_ids = None: ")
    np.save(draft / "target_ids.npy", IDS)
    (draft / "params" / "_METADATA").unlink()
    refused("params: not a complete Orbax checkpoint")
    shutil.rmtree(draft / "params")
    refused("params: no such directory")


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_layers=0), "num_layers = 0:...1"),
        (dict(sliding_window=0), "sliding_window = 0:...1"),
        (dict(draft_vocab_size=65), "draft_vocab_size = 65:...64"),
        (dict(norm_before_fc=True), "norm_before_fc = True:...False"),
        (dict(use_aux_hidden_state=False), "fc_norm = True:...False"),
        (dict(feature_size=40), "feature_size = 40:...16...fc_norm"),
    ],
)
def test_invalid_shapes_are_refused(changes: dict, said: str):
    with refuses(said):
        replace(CONFIG, **changes)


def test_fit_to_the_policy():
    policy = DecoderConfig(**SHAPE, intermediate_size=16, num_layers=8, num_heads=2, feature_layers=LAYERS)
    CONFIG.check(policy)
    replace(CONFIG, fc_norm=False, use_aux_hidden_state=False, feature_size=16).check(policy)
    for changes, said in [
        (dict(hidden_size=32), "draft.hidden_size = 16: ...32"),
        (dict(feature_layers=(1, 2)), "draft.feature_size = 48: "),
        (dict(vocab_size=65), "draft.vocab_size = 64: "),
    ]:
        with refuses(said):
            CONFIG.check(replace(policy, **changes))
