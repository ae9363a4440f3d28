"""Adapters in PEFT's files: what is read, what is refused, and what is written back."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.decoder import init_decoder
from models.files import read_json, write_json
from models.hf.config import read_hf_config
from models.hf.layout import stored_tensors
from models.hf.load import load_policy
from models.hf.peft_files import CONFIG, TENSORS, load_adapters, read_peft, save_adapters
from models.lora import LoraConfig, adapted_layers, init_adapters, with_scales
from models.params import by_path, init_params
from specjax.adapters import merged
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Params
from tests.models.parity import GOLDEN, described
from tests.refusals import refuses

ONE, EIGHT = make_mesh(MeshConfig()), make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
LLAMA = read_hf_config(GOLDEN / "llama", ())
FIELDS = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
PATTERNS = ((2, "layer_1.attention.q"), (5, "o"))


def write(directory: Path, changes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Write a PEFT directory for the golden Llama, with random tensors as torch has them. Return these."""
    directory.mkdir()
    write_json(directory / CONFIG, FIELDS | changes)
    weights, rng = load_file(GOLDEN / "llama" / "model.safetensors"), np.random.default_rng(1)
    modules = {stored.path[:-1]: name.removesuffix(".weight") for name, stored in stored_tensors(LLAMA).items()}
    tensors = dict[str, np.ndarray]()
    for layer in read_peft(directory, LLAMA):
        module = modules[layer.path]
        out, into = weights[f"{module}.weight"].shape
        for part, shape in (("A", (layer.rank, into)), ("B", (out, layer.rank))):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32)
    save_file(tensors, directory / TENSORS)
    return tensors


@pytest.mark.parametrize(
    ("case", "alpha", "rslora"), [("llama", 6.0, False), ("qwen2", None, True), ("qwen3_moe", 0.5, True)]
)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, case: str, alpha: float | None, rslora: bool):
    decoder = read_hf_config(GOLDEN / case, ())
    config = LoraConfig(rank=3, alpha=alpha, rslora=rslora, rank_pattern=PATTERNS)
    layers = adapted_layers(partial(init_decoder, decoder), config)
    assert all(layer.alpha == (layer.rank if alpha is None else alpha) for layer in layers)
    fresh = init_params(partial(init_adapters, layers), jax.random.key(0), ONE)
    for layer in layers:
        largest, bound = np.abs(by_path(fresh)[*layer.path, "lora_a"]).max(), np.prod(layer.into) ** -0.5
        assert bound / 2 < largest <= bound
    # B too is random.
    adapters = jax.tree.map(lambda x: x + 0.1, fresh)
    save_adapters(tmp_path / "out", adapters, layers, decoder, "org/name", "main")
    assert read_peft(tmp_path / "out", decoder) == layers
    again = load_adapters(tmp_path / "out", layers, decoder, EIGHT)
    assert described(by_path(again)) == described(by_path(adapters))
    save_adapters(tmp_path / "again", again, layers, decoder, "org/name", "main")
    for name in (CONFIG, TENSORS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    fields = read_json(tmp_path / "out" / CONFIG)
    assert (fields["base_model_name_or_path"], fields["revision"], fields["r"]) == ("org/name", "main", 3)
    dense = decoder.experts is None
    assert len(fields["target_modules"]) == (7 if dense else len(layers))


def test_the_adapters_are_what_peft_adds(tmp_path: Path):
    """W + s B A, in torch's shapes and with its own scale for each module."""
    changes = {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"o_proj": 4}}
    tensors = write(tmp_path / "peft", changes | {"alpha_pattern": {"1.mlp.up_proj": 0.5}})
    layers = read_peft(tmp_path / "peft", LLAMA)
    base = with_scales(load_policy(GOLDEN / "llama", LLAMA, ONE), layers, ONE)
    policy = by_path(merged(Params(load_adapters(tmp_path / "peft", layers, LLAMA, ONE), {}, base=base)).policy)
    for name, weight in load_file(GOLDEN / "llama" / "model.safetensors").items():
        stored, module = stored_tensors(LLAMA)[name], f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if "proj" in name:
            a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
            alpha, rank = 0.5 if "1.mlp.up" in name else 6, 4 if "o_proj" in name else 3
            expected = weight + alpha / rank**0.5 * b @ a
        np.testing.assert_allclose(stored.pack(np.asarray(policy[stored.path])), expected, atol=1e-5, err_msg=name)


ALL_Q = {f"{i}.attention.q": (3, 2.0) for i in range(4)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_modules": ["q_proj"]}, ALL_Q),
        ({"target_modules": "ALL-linear", "exclude_modules": r".*mlp.*|.*\.[kvo]_proj"}, ALL_Q),
        ({"target_modules": r"model\.layers\.\d\.self_attn\.q_proj", "exclude_modules": ["lm_head"]}, ALL_Q),
        (
            {"target_modules": ["0.mlp.up_proj", "model.layers.2.self_attn.k_proj"]},
            {"0.mlp.up": (3, 2.0), "2.attention.k": (3, 2.0)},
        ),
        (  # the first pattern that matches counts, and one must match from a dot or the start
            {"target_modules": ["q_proj"], "rank_pattern": {"_proj": 9, "^model.layers.[01].*": 4, "q_proj": 6}},
            {f"{i}.attention.q": (4, 1.5) if i < 2 else (6, 1.0) for i in range(4)},
        ),
        (
            {"target_modules": ["q_proj"], "use_rslora": True, "r": 4, "alpha_pattern": {"3.self_attn.q_proj": 1}},
            {f"{i}.attention.q": (4, 0.5 if i == 3 else 3.0) for i in range(4)},
        ),
        (
            {"target_modules": ["q_proj"], "r": None, "lora_dropout": 0.1, "init_lora_weights": "gaussian"},
            {f"{i}.attention.q": (8, 0.75) for i in range(4)},
        ),
    ],
)
def test_targets_patterns_and_scales(tmp_path: Path, changes: dict, expected: dict[str, tuple[int, float]]):
    write_json(tmp_path / CONFIG, FIELDS | changes)
    found = {".".join(layer.path): (layer.rank, layer.scale) for layer in read_peft(tmp_path, LLAMA)}
    assert found == {f"layer_{path}": values for path, values in expected.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3": must be "LORA"'),
        ({"task_type": "SEQ_CLS"}, 'task_type = "SEQ_CLS": '),
        ({"use_dora": True}, "use_dora = true: must be false"),
        ({"lora_bias": True}, "lora_bias = true: "),
        ({"use_qalora": True}, "use_qalora = true: "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = true: "),
        ({"bias": "lora_only"}, 'bias = "lora_only": must be "none"'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]: '),
        ({"target_parameters": ["mlp.experts"]}, 'target_parameters = ["mlp.experts"]: '),
        ({"layer_replication": [[0, 2]]}, "layer_replication = [[0, 2]]: "),
        ({"layers_to_transform": [1]}, "layers_to_transform = [1]: "),
        ({"trainable_token_indices": [5]}, "trainable_token_indices = [5]: "),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens = [5]: "),
        *(
            ({"init_lora_weights": name}, f'init_lora_weights = "{name}": ')
            for name in ("pissa", "olora", "loftq", "eva")
        ),
        ({"new_field": 1}, "new_field = 1: unknown field"),
        ({"target_modules": None}, "target_modules = null: "),
        (
            {"target_modules": ["q_proj", "qkv_proj"]},
            'target_modules = "qkv_proj": matches no layer; must be of down_proj',
        ),
        ({"target_modules": ["lm_head"]}, 'target_modules = "lm_head": '),
        ({"target_modules": "(q_proj"}, 'target_modules = "(q_proj": must be a regular expression'),
        ({"exclude_modules": "model.*"}, 'target_modules = ["q_proj", "down_proj"]: leaves no layer'),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj = 0: must be a positive integer"),
        ({"rank_pattern": {"q_proj)": 2}}, 'rank_pattern = "q_proj)": must be a regular expression'),
        ({"alpha_pattern": {"q_proj": "2"}}, 'alpha_pattern: q_proj = "2": must be a positive number'),
        ({"lora_alpha": 1e9}, "lora_alpha = 1000000000.0: must be at most 1000000"),
        ({"r": 0}, "r = 0: must be a positive integer"),
    ],
)
def test_fields_are_refused(tmp_path: Path, changes: dict, message: str):
    write_json(tmp_path / CONFIG, FIELDS | changes)
    with refuses(message):
        read_peft(tmp_path, LLAMA)


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FIRST: None}, f"{FIRST}: missing from "),
        ({"base_model.model.lm_head.lora_A.weight": np.ones((3, 16), np.float32)}, "base_model.model.lm_head.lora_A"),
        ({FIRST: np.ones((4, 24), np.float32)}, f"{FIRST}: has shape (4, 24) in the file; must be (3, 24)"),
        ({FIRST: np.ones((3, 24))}, f"{FIRST}: dtype F64; must be F32"),
        ({FIRST: np.full((3, 24), np.nan, np.float32)}, f"...{FIRST}: 72 of 72 values are nan or inf"),
    ],
)
def test_tensors_are_refused(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str):
    tensors = write(tmp_path / "peft", {}) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, tmp_path / "peft" / TENSORS)
    with refuses(message):
        load_adapters(tmp_path / "peft", read_peft(tmp_path / "peft", LLAMA), LLAMA, ONE)


def test_half_precision_is_read_as_float32(tmp_path: Path):
    tensors = write(tmp_path / "peft", {})
    save_file({name: x.astype(np.float16) for name, x in tensors.items()}, tmp_path / "peft" / TENSORS)
    layers = read_peft(tmp_path / "peft", LLAMA)
    adapters = load_adapters(tmp_path / "peft", layers, LLAMA, ONE)
    assert {x.dtype for x in jax.tree.leaves(adapters)} == {np.dtype("float32")}
