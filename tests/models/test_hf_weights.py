import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from models.hf import load as hf_load
from models.hf import save as hf_save
from models.hf.config import read_hf_config
from models.hf.layout import stored_tensors
from models.hf.load import INDEX, SINGLE, load_policy
from models.hf.save import save_policy
from models.params import by_path
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import PyTree
from tests.models.parity import FEATURE_LAYERS, GOLDEN, described
from tests.refusals import refuses

ONE, EIGHT = MeshConfig(), MeshConfig(fsdp=2, expert=2, tensor=2)


def load(directory: Path, mesh: MeshConfig = ONE, **options) -> PyTree:
    return load_policy(directory, read_hf_config(directory, FEATURE_LAYERS), make_mesh(mesh), **options)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def assert_same_bytes(a: dict, b: dict) -> None:
    assert described(a) == described(b)


def copy_of(case: str, tmp_path: Path, **changes: np.ndarray | None) -> Path:
    """Copy a golden checkpoint into one file, with some tensors replaced, added or (None) removed."""
    directory = tmp_path / case
    shutil.copytree(GOLDEN / case, directory)
    tensors = {**read_tensors(directory), **changes}
    save_file({k: x for k, x in tensors.items() if x is not None}, directory / SINGLE, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("mesh", "limit"), [(ONE, 10**9), (EIGHT, 10_000)], ids=["one device", "2x2x2, several files"])
@pytest.mark.parametrize("case", ["qwen3", "qwen3_sharded", "qwen2", "llama", "qwen3_moe"])
def test_round_trip_keeps_every_byte(tmp_path: Path, case: str, mesh: MeshConfig, limit: int):
    config = read_hf_config(GOLDEN / case, FEATURE_LAYERS)
    save_policy(tmp_path / "out", load(GOLDEN / case, mesh), config, max_file_bytes=limit)
    assert_same_bytes(read_tensors(tmp_path / "out"), read_tensors(GOLDEN / case))
    assert read_hf_config(tmp_path / "out", FEATURE_LAYERS) == config
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert (limit == 10**9) == (len(files) == 1) == (files[0].name == SINGLE)
    assert all(path.stat().st_size < limit + 5_000 for path in files)
    assert_same_bytes(by_path(load(tmp_path / "out")), by_path(load(GOLDEN / case)))


def test_several_files_of_bfloat16_from_torch_and_param_dtype():
    """qwen3_sharded holds qwen3 rounded to bfloat16."""
    rounded = {path: x.astype(jnp.bfloat16) for path, x in by_path(load(GOLDEN / "qwen3")).items()}
    assert_same_bytes(by_path(load(GOLDEN / "qwen3_sharded", EIGHT)), rounded)
    assert_same_bytes(by_path(load(GOLDEN / "qwen3", param_dtype="bfloat16")), rounded)
    widened = by_path(load(GOLDEN / "qwen3_sharded", param_dtype="float32"))
    assert_same_bytes(widened, {path: x.astype(jnp.float32) for path, x in rounded.items()})


def test_float16_becomes_float32_or_the_requested_dtype(tmp_path: Path):
    halves = {name: x.astype(np.float16) for name, x in read_tensors(GOLDEN / "qwen3").items()}
    directory = copy_of("qwen3", tmp_path, **halves)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"dtype": "float16"}))
    assert read_hf_config(directory, ()).param_dtype == "float32"
    whole = by_path(load(GOLDEN / "qwen3"))
    rounded = {path: x.astype(jnp.float16).astype(jnp.float32) for path, x in whole.items()}
    assert_same_bytes(by_path(load(directory)), rounded)
    rounded = {path: x.astype(jnp.bfloat16) for path, x in rounded.items()}
    assert_same_bytes(by_path(load(directory, param_dtype="bfloat16")), rounded)


def test_mixed_dtypes_are_kept(tmp_path: Path):
    """Some checkpoints keep their norms in float32."""
    norm = read_tensors(GOLDEN / "qwen3")["model.norm.weight"]
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "qwen3_sharded", source)
    last = sorted(source.glob("*.safetensors"))[-1]
    with safe_open(last, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file({**tensors, "model.norm.weight": norm}, last, metadata={"format": "pt"})
    save_policy(tmp_path / "out", load(source), read_hf_config(source, FEATURE_LAYERS))
    assert_same_bytes(read_tensors(tmp_path / "out"), read_tensors(source))
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_shard_reads_only_its_part():
    tensors = stored_tensors(read_hf_config(GOLDEN / "qwen3", FEATURE_LAYERS))
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    index = (slice(0, 8, None), slice(2, 4, None), slice(None))
    assert query.index(index, (16, 4, 8)) == (slice(16, 32), slice(0, 8))
    with refuses("layer_0.attention.q.kernel:"):
        query.index((slice(None), slice(None), slice(0, 4)), (16, 4, 8))
    # The tensors of a layer's experts are stacked, and a shard reads its part of its experts.
    stored = stored_tensors(read_hf_config(GOLDEN / "qwen3_moe", ()))["model.layers.0.mlp.experts.5.up_proj.weight"]
    assert (stored.path, stored.place) == (("layer_0", "mlp", "experts", "up"), 5)
    shape, index = (8, 16, 12), (slice(4, 8), slice(0, 8), slice(6, 12))
    assert stored.of(shape) == (16, 12) and stored.shape(stored.of(shape)) == (12, 16)
    assert stored.index(stored.of(index), stored.of(shape)) == (slice(6, 12), slice(0, 8))


def test_tensors_that_are_accepted_or_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_load, "_ROWS_AT_ONCE", 48)
    embedding = read_tensors(GOLDEN / "qwen3")["model.embed_tokens.weight"]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    directory = copy_of("qwen3", tmp_path, **{"lm_head.weight": embedding}, **frequencies)
    assert_same_bytes(by_path(load(directory)), by_path(load(GOLDEN / "qwen3")))


NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.3.self_attn.q_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
TIED = "lm_head.weight: ...tie_word_embeddings"
REFUSED = {
    "missing": ("qwen3", {NORM: None}, f"{NORM}: missing...qwen3"),
    "several missing": ("llama", {NORM: None, QUERY: None, "lm_head.weight": None}, "lm_head.weight: missing...2 more"),
    "unexpected": ("llama", {"score.weight": np.ones((1, 16))}, "score.weight: unexpected...llama"),
    "bias": ("qwen3", {BIAS: np.ones(32)}, f"{BIAS}: unexpected"),
    "shape": ("qwen2", {QUERY: np.ones((16, 15), "f")}, f"{QUERY}: ...(16, 15)...(16, 16)"),
    "transposed": ("qwen3", {QUERY: np.ones((16, 32), "f")}, f"{QUERY}: ...(16, 32)...(32, 16)"),
    "dtype": ("qwen2", {NORM: np.ones(16, np.float64)}, f"{NORM}: ...F64"),
    "tied head": ("qwen3", {"lm_head.weight": np.ones((64, 16), "f")}, TIED),
    "tied head's shape": ("qwen3", {"lm_head.weight": np.ones((65, 16), "f")}, TIED),
    "expert missing": ("qwen3_moe", {EXPERT: None}, f"{EXPERT}: missing"),
    "expert's shape": ("qwen3_moe", {EXPERT: np.ones((12, 15), "f")}, f"{EXPERT}: ...(12, 15)...(12, 16)"),
    "expert's dtype": ("qwen3_moe", {EXPERT: np.ones((12, 16), np.float16)}, f"...{EXPERT}: dtype F16...F32"),
    "nan": ("qwen3_moe", {EXPERT: np.full((12, 16), np.nan, "f")}, "...layer_2.mlp.experts.up: 192 of 1536"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_tensors(tmp_path: Path, name: str):
    case, changes, message = REFUSED[name]
    with refuses(message):
        load(copy_of(case, tmp_path, **changes), MeshConfig(expert=2) if case == "qwen3_moe" else ONE)


def test_refused_files(tmp_path: Path):
    directory = tmp_path / "qwen3_sharded"
    shutil.copytree(GOLDEN / "qwen3_sharded", directory)
    first, second, _ = sorted(directory.glob("*.safetensors"))

    def refused(message: str) -> None:
        with refuses(message):
            load(directory)

    index = json.loads((directory / INDEX).read_text())
    embedding = "model.embed_tokens.weight"
    index["weight_map"][embedding] = second.name
    (directory / INDEX).write_text(json.dumps(index))
    refused(f"{embedding}: ...{first.name}...{INDEX}...{second.name}")
    del index["weight_map"][embedding]
    (directory / INDEX).write_text(json.dumps(index))
    refused(f"{embedding}: ...{first.name}...{INDEX}")
    (directory / INDEX).write_text("{}")
    refused(f"/{INDEX}: ...weight_map")
    shutil.copy(GOLDEN / "qwen3_sharded" / INDEX, directory)
    second.write_bytes(second.read_bytes()[:-1])
    refused(f"/{second.name}: ...cut short")
    second.unlink()
    refused(f"/{second.name}: ...No such file")
    (directory / INDEX).unlink()
    refused(f"/qwen3_sharded: ...{SINGLE}...{INDEX}")


def test_export_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = read_hf_config(GOLDEN / "qwen3", FEATURE_LAYERS)
    params = load(GOLDEN / "qwen3")
    (tmp_path / "used").mkdir()
    for mine in ("used/notes.txt", "file"):
        (tmp_path / mine).write_text("mine")
    for name in ("used", "file"):
        with refuses(f"{name}: ...empty"):
            save_policy(tmp_path / name, params, config)
    monkeypatch.setattr(hf_save, "write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_policy(tmp_path / "new", params, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "used"]


def test_export_refuses_other_parameters(tmp_path: Path):
    config = read_hf_config(GOLDEN / "qwen3", FEATURE_LAYERS)
    params = load(GOLDEN / "qwen3")
    without = {name: part for name, part in params.items() if name != "norm"}
    longer = {**params, "norm": jax.tree.map(lambda x: x[None], params["norm"])}
    for other, shape in ((without, "None"), (longer, "(1, 16)")):
        with refuses(f"norm.scale...{shape}...(16,)"):
            save_policy(tmp_path / "out", other, config)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with refuses("safetensors...pip install", ImportError):
        load(GOLDEN / "qwen3")
