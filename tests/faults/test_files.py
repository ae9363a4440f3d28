"""Faults in the files of a model: not regular files, files outside the directory, values of wrong types."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.data.tokenizers import HuggingFaceTokenizer
from models.checkpoints.draft import head_from_json, load_draft_checkpoint, save_draft_checkpoint
from models.checkpoints.made_for import read_made_for
from models.config import DecoderConfig, ExpertsConfig
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.files import read_json
from models.hf.config import config_from_hf, config_to_hf, read_hf_config
from models.hf.drafts.dialects import dialect_of
from models.hf.drafts.reader import draft_from_public
from models.hf.drafts.stated_policy import check_stated_policy
from models.hf.drafts.vocabulary import read_target_ids
from models.hf.load import INDEX, SINGLE, open_tensors
from models.hf.peft_config import layers_from_peft
from models.hf.torch_files import torch_views
from models.lora import Adapted
from models.params import init_params
from models.rope import Llama3Scaling, YarnScaling
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.eagle3_checkpoints import Public
from tests.models.test_block_files import PUBLIC
from tests.refusals import refuses

ONE = make_mesh(MeshConfig())
SHAPE = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8, num_layers=7)
DECODER = DecoderConfig(**SHAPE, qk_norm=True, sliding_window=4, sliding_layers=(1, 2), feature_layers=(0, 3))
YARN = YarnScaling(2.0, 64, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0)
LLAMA = DecoderConfig(**SHAPE)
SCALING = Llama3Scaling(2.0, 1.0, 4.0, 64)
HEAD = Eagle3Config(**{**SHAPE, "num_layers": 1}, draft_vocab_size=8, feature_size=24, rope_scaling=SCALING)
QWEN = DecoderConfig(**SHAPE, qk_norm=True, rope_scaling=YARN)
EXPERTS = ExpertsConfig(num_experts=4, active=2, intermediate_size=8)
PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "rank_pattern": {"q_proj": 3},
}
MODULES = {
    f"model.layers.{i}.self_attn.{name}_proj": Adapted((f"layer_{i}", name), (8,), (8,), (None, None), 1, 1.0, False)
    for i in range(7)
    for name in "qv"
}


def deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


WRONG = ([], {}, "x", "", 5, 0, -1, 10**9, 2**31, 10**400, 1e308, True, None, [[]], [1, "a"], [{}], {"a": 1}, deep(300))


def changed(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields with one value replaced by a wrong one, for all values, also in nested objects and lists."""
    for name, value in fields.items():
        yield from ({**fields, name: wrong} for wrong in WRONG)
        if isinstance(value, dict):
            yield from ({**fields, name: inner} for inner in changed(value))
        if isinstance(value, list | tuple) and value:
            yield from ({**fields, name: [*value[:-1], wrong]} for wrong in WRONG)


def read_public(fields: Mapping[str, Any]) -> None:
    if dialect_of(fields) is not None:
        draft_from_public(fields)
    check_stated_policy(fields, LLAMA)


PARSED: dict[str, tuple[Mapping[str, Any], Callable[[Any], Any]]] = {
    "qwen3": (config_to_hf(DECODER) | {"layer_types": ["full_attention"] * 7}, config_from_hf),
    "yarn": (config_to_hf(QWEN), config_from_hf),
    "mixture": (config_to_hf(replace(QWEN, experts=EXPERTS)), config_from_hf),
    "mistral": (config_to_hf(DecoderConfig(**SHAPE, sliding_window=4)), config_from_hf),
    "windows": (config_to_hf(DECODER) | {"use_sliding_window": True, "max_window_layers": 3}, config_from_hf),
    "specforge": (Public().fields() | {"target_hidden_size": 12}, read_public),
    "speculators": (Public("speculators", window=4, num_layers=2).fields(), read_public),
    "ours": (asdict(HEAD), lambda fields: head_from_json(fields, Eagle3Config)),
    **{f"block draft, {name}": (public.fields, draft_from_public) for name, public in PUBLIC.items()},
    "peft": (PEFT, partial(layers_from_peft, layers=MODULES)),
}


@pytest.mark.parametrize("name", PARSED)
def test_row_21_fields_of_other_types_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    fields, parse = PARSED[name]
    parse(fields)
    refused = 0
    for other in changed(fields):
        try:
            parse(other)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            refused += 1
    assert refused > 5 * len(fields)


COUNTED = ("num_hidden_layers", "num_layers", "num_target_layers", "num_experts", "num_experts_per_tok", "block_size")


def test_row_80_counts_of_what_is_made_one_by_one_are_bounded_first() -> None:
    """A list of a billion layers takes 8 GB."""
    found = set[str]()
    for fields, read in PARSED.values():
        layer = fields.get("transformer_layer_config", {})
        for name in COUNTED:
            other = {**fields, name: 4097} if name in fields else fields
            if name in layer:
                other = {**fields, "transformer_layer_config": {**layer, name: 4097}}
            if other is not fields and name != "num_target_layers":
                found.add(name)
                with refuses(f"{name} = 4097: must be "):
                    read(other)
    assert found == {*COUNTED} - {"num_target_layers"}
    with refuses("num_target_layers = 4097: must be a positive integer, at most 256"):
        check_stated_policy({"num_target_layers": 4097}, LLAMA)
    # Arrays of a vocabulary's size are compared with the files'.
    large = replace(HEAD, vocab_size=2**31 - 1)
    maps = {"d2t": np.zeros(8, np.int64), "t2d": np.ones(8, bool)}
    with refuses("t2d: must be 2147483647 flags"):
        read_target_ids(maps, large)


EVIL = "(([a-z_.0-9]+)+)+X"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_row_79_an_expression_of_a_stranger_takes_linear_time(name: str) -> None:
    """Python's `re` takes 2.8 times longer for each letter of a module's name."""
    value = {EVIL: 2} if name.endswith("pattern") else EVIL
    if name == "target_modules":
        with refuses(f'target_modules = "{EVIL}": matches no layer'):
            layers_from_peft(PEFT | {name: value}, MODULES)
    else:
        found = layers_from_peft(PEFT | {"rank_pattern": {}} | {name: value}, MODULES)
        assert [(layer.rank, layer.alpha) for layer in found.values()] == 7 * [(2, 4.0)]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?!.*v_proj).*", "invalid perl operator"),
        (r"(q)_\1", "invalid escape"),
        ("q_proj)|(v_proj", "unexpected )"),
        (".{,90}q_proj", "{, means something else in Python"),
        ("[[:alpha:]_.]+", "[: means something else in Python"),
        ("q" * 10_001, "has 10001 characters"),
        ("\ud800", "surrogates"),
    ],
)
def test_row_79_what_re2_does_not_read_as_python_is_refused(pattern: str, reason: str) -> None:
    with refuses(
        "target_modules = ...: must be a regular expression that RE2 knows, or a list of modules: targeted_module_names"
    ):
        layers_from_peft(PEFT | {"target_modules": pattern}, MODULES)
    with pytest.raises(ValueError, match=re.escape(reason)):
        layers_from_peft(PEFT | {"rank_pattern": {pattern: 2}}, MODULES)


def test_row_79_patterns_are_counted() -> None:
    with refuses("rank_pattern: has 10001 patterns; must have at most 10000"):
        layers_from_peft(PEFT | {"rank_pattern": dict.fromkeys(map(str, range(10_001)), 2)}, MODULES)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    params = init_params(partial(init_eagle3, HEAD), jax.random.key(0), ONE)
    save_draft_checkpoint(tmp_path / "draft", params, HEAD, None, (0, 1, 2))
    return tmp_path / "draft"


@pytest.mark.parametrize(
    "file", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", 5, None, ["x"], "x\0", "x" * 5000]
)
def test_row_21_weights_lie_beside_their_index(tmp_path: Path, file: object) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "x")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with refuses("/"):
        open_tensors(directory)
    (directory / "x").symlink_to(tmp_path / "x")  # as in the cache of huggingface_hub
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": "x"}}))
    assert open_tensors(directory).keys() == {"w"}


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", IRREGULAR)
def test_row_21_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    reads: dict[str, Callable[[Path], object]] = {
        "config.json": lambda path: read_hf_config(path.parent),
        "made_for.json": lambda path: read_made_for(path.parent),
        SINGLE: lambda path: open_tensors(path.parent),
        INDEX: lambda path: open_tensors(path.parent),
        "pytorch_model.bin": lambda path: torch_views(path, {}),
        **dict.fromkeys(
            ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model", "vocab.txt"],
            lambda path: HuggingFaceTokenizer(path.parent),
        ),
        "tool_use.jinja": lambda path: HuggingFaceTokenizer(path.parent.parent),
    }
    for name, read in reads.items():
        within = "additional_chat_templates" if name == "tool_use.jinja" else ""
        path = tmp_path / name.replace(".", "") / within / name
        path.parent.mkdir(parents=True)
        IRREGULAR[kind](path)
        with pytest.raises(ValueError, match=f"{name}: must be a regular file"):
            read(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_row_21_only_regular_files_are_restored(draft: Path, kind: str) -> None:
    load_draft_checkpoint(draft, ONE)
    files = sorted(path for path in (draft / "params").rglob("*") if path.is_file())
    kept = files[-1].read_bytes()
    files[-1].unlink()
    IRREGULAR[kind](files[-1])
    with refuses(f"/{files[-1].name}: "):
        load_draft_checkpoint(draft, ONE)
    files[-1].unlink()
    files[-1].write_bytes(kept)
    load_draft_checkpoint(draft, ONE)


def test_row_21_json_of_another_shape_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("[" * 100_000, '{"a":' * 100_000, "5", "[]", "", "{", '{"a": ' + "9" * 5000 + "}", "\xff"):
        path.write_text(text, encoding="latin-1")
        with refuses("/config.json: "):
            read_json(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with refuses("/config.json: ...bytes..."):
        read_json(path)


def test_row_21_a_draft_of_other_types_is_refused(draft: Path) -> None:
    path, fields = draft / "config.json", read_json(draft / "config.json")
    for name, value in ("feature_layers", 5), ("feature_layers", ["x"]), ("head", []), ("kind", []):
        path.write_text(json.dumps(fields | {name: value}))
        with refuses(f"/config.json: {name} = "):
            load_draft_checkpoint(draft, ONE)
