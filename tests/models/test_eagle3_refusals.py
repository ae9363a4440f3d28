"""EAGLE-3 heads that are refused: invalid tensors and fields, and options that a dialect cannot express."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.files import write_json
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.writer import save_public_draft
from tests.models.eagle3_checkpoints import ONE, REDUCED, VOCAB, Public, loaded
from tests.refusals import refuses

SPECFORGE, SPECULATORS = Public(), Public(dialect="speculators")

SHUFFLED = np.array(REDUCED)[[0, 1, 2, 4, 3, 5, 6, 7, 8]] - np.arange(9)
OFFSETS = np.array(REDUCED) - np.arange(9)
QUERY = "midlayer.self_attn.q_proj.weight"
TENSORS: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "missing": ({QUERY: None}, f"{QUERY}: .../head"),
    "unknown": ({"fc.bias": np.zeros(12, "f")}, "fc.bias: .../head"),
    "a norm that no flag announces": ({"input_norm.weight": np.ones(36, "f")}, "input_norm.weight: unexpected in "),
    "another dialect's names": (
        {"layers.0.hidden_norm.weight": np.ones(12, "f")},
        "layers.0.hidden_norm.weight: unexpected in ",
    ),
    "shape": ({"fc.weight": np.ones((12, 24), "f")}, "fc.weight: ...(12, 24)...(12, 36)"),
    "dtype": ({"fc.weight": np.ones((12, 36))}, "fc.weight: ...F64"),
    "shuffled map": ({"d2t": SHUFFLED}, "d2t: target_ids: "),
    "map of target ids": ({"d2t": np.array(REDUCED)}, "target_ids: ...0...24...0...16"),
    "map beyond": ({"d2t": OFFSETS + 1}, "target_ids: ...1...17...0...16"),
    "map's length": ({"d2t": OFFSETS[:8]}, "d2t: ...int64...(8,)...int64...(9,)"),
    "map of floats": ({"d2t": OFFSETS.astype("f")}, "d2t: ...float32...(9,)...int64...(9,)"),
    "flags of other ids": ({"t2d": np.arange(VOCAB) < 9}, "t2d: ...17...d2t"),
    "flags alone": ({"d2t": None}, "t2d: ...d2t"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_refused_tensors(tmp_path: Path, name: str):
    changes, message = TENSORS[name]
    with refuses(message):
        loaded(tmp_path, SPECFORGE, **changes)


def inner(**changes: Any) -> dict[str, Any]:
    return {"transformer_layer_config": SPECULATORS.fields()["transformer_layer_config"] | changes}


QWEN3 = {"model_type": "qwen3"}
WINDOW = dict(use_sliding_window=True, sliding_window=512)


@pytest.mark.parametrize(
    ("said", "window"),
    [
        (WINDOW | {"max_window_layers": 0}, 512),
        (WINDOW | {"max_window_layers": 28}, None),
        (WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention"]}, None),
        (WINDOW | {"layer_types": ["sliding_attention"]}, 512),
        (WINDOW | {"use_sliding_window": False}, None),
    ],
)
def test_windows_are_those_of_qwen3(tmp_path: Path, said: dict[str, Any], window: int | None):
    public = replace(SPECULATORS, qk_norm=True)
    public.write(tmp_path)
    write_json(tmp_path / "config.json", public.fields() | inner(**QWEN3, **said))
    assert load_public_draft(tmp_path, ONE).config.sliding_window == window


MIXED = inner(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
MIXED_BY_WINDOW = inner(**QWEN3, **WINDOW, num_hidden_layers=2, max_window_layers=1)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FIELDS: dict[str, tuple[Public, dict[str, Any], str]] = {
    "unknown": (SPECFORGE, {"logit_scale": 2.0}, "logit_scale = 2.0: "),
    "unknown to eagle_config": (SPECFORGE, {"eagle_config": {"depth": 3}}, "eagle_config.depth = 3: "),
    "unknown outside": (SPECULATORS, {"parallel": True}, "parallel = true: "),
    "unknown inside": (SPECULATORS, inner(logit_scale=2.0), "logit_scale = 2.0: "),
    "two norms": (SPECULATORS, {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc = True: ...False"),
    "no flag": (SPECULATORS, {"fc_norm": "yes"}, 'fc_norm = "yes": ...true...false'),
    "width": (SPECFORGE, {"target_hidden_size": 16}, "target_hidden_size = 16: ...hidden_size = 12"),
    "layers": (SPECFORGE, {"num_hidden_layers": 2}, "num_hidden_layers = 2: ...1"),
    "family": (SPECFORGE, {"model_type": "qwen3"}, 'model_type = "qwen3": ..."llama"'),
    "biases": (SPECULATORS, inner(model_type="qwen2"), 'model_type = "qwen2": ..."llama"..."qwen3"'),
    "mixed": (SPECULATORS, MIXED, "layer_types = ...full_attention...sliding_attention"),
    "mixed by window": (replace(SPECULATORS, qk_norm=True, num_layers=2), MIXED_BY_WINDOW, "max_window_layers = 1: "),
    "no window": (SPECULATORS, inner(layer_types=["sliding_attention"]), "sliding_window = null: "),
    "no layer": (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config = null: "),
    "other speculator": (SPECULATORS, {"speculators_model_type": "eagle"}, 'speculators_model_type = "eagle": '),
    "layer ids": (SPECULATORS, {LAYER_IDS: [-1, 2, 3]}, f"{LAYER_IDS} = [-1, 2, 3]: "),
    "vocabulary": (SPECFORGE, {"draft_vocab_size": 18}, "draft_vocab_size = 18: ...17"),
    "scaling": (SPECFORGE, {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type = "),
}


@pytest.mark.parametrize("name", FIELDS)
def test_refused_fields(tmp_path: Path, name: str):
    public, changes, message = FIELDS[name]
    public.write(tmp_path)
    write_json(tmp_path / "config.json", public.fields() | changes)
    with refuses(f"/config.json: {message}"):
        load_public_draft(tmp_path, ONE)


NORM_FIRST = replace(SPECULATORS, flags=("norm_before_residual",))


@pytest.mark.parametrize(
    ("public", "dialect", "message"),
    [
        (replace(SPECULATORS, num_layers=2), "specforge", "num_layers = 2:...specforge"),
        (replace(SPECULATORS, qk_norm=True), "specforge", "qk_norm = True:...specforge"),
        (replace(SPECULATORS, window=3), "specforge", "sliding_window = 3:...specforge"),
        (NORM_FIRST, "specforge", "norm_before_residual = True:...specforge"),
        (replace(SPECULATORS, layers=(0, 1, 2)), "specforge", "feature_layers = (0, 1, 2):...specforge"),
        (Public(use_aux_hidden_state=False), "speculators", "use_aux_hidden_state = False:...speculators"),
    ],
)
def test_options_that_a_dialect_cannot_express(tmp_path: Path, public: Public, dialect: Any, message: str):
    draft = loaded(tmp_path, public)
    with refuses(message):
        save_public_draft(tmp_path / "out", draft, dialect)
    assert not (tmp_path / "out").exists()
