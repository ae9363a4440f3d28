import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.config import DecoderConfig
from models.hf.config import carried_fields, config_from_hf, config_to_hf, read_hf_config
from models.rope import Llama3Scaling

# As published, written by transformers 4.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN25_05B = {
    **QWEN25_7B,
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "transformers_version": "4.40.1",
    "use_mrope": False,
    "vocab_size": 151936,
}
LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
# Qwen2.5's kind of block, with an MTP layer that models.hf.mtp_files reads.
MIMO_7B = {
    **{name: value for name, value in QWEN25_7B.items() if name not in ("sliding_window", "max_window_layers")},
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "vocab_size": 151680,
}
PUBLISHED = [QWEN3_8B, QWEN25_7B, QWEN25_05B, LLAMA32_1B]


def as_transformers_5(fields: dict[str, Any]) -> dict[str, Any]:
    fields = dict(fields)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), **(fields.pop("rope_scaling", None) or {})}
    return {**fields, "rope_parameters": rope, "dtype": fields.pop("torch_dtype")}


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Without the fields that are given as ..., with the others."""
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def test_published_configs():
    bf16 = dict(dtype="bfloat16", param_dtype="bfloat16")
    assert config_from_hf(QWEN3_8B) == DecoderConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        rope_theta=1e6,
        max_positions=40_960,
        feature_layers=(2, 18, 33),
        **bf16,
    )
    assert config_from_hf(QWEN25_7B) == DecoderConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        qkv_bias=True,
        rope_theta=1e6,
        max_positions=32_768,
        feature_layers=(2, 14, 25),
        **bf16,
    )
    assert config_from_hf(LLAMA32_1B, feature_layers=()) == DecoderConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        tie_embeddings=True,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        norm_eps=1e-5,
        max_positions=131_072,
        **bf16,
    )


def test_mimo_is_qwen2_but_in_name():
    config = config_from_hf(MIMO_7B)
    assert (config.qkv_bias, config.qk_norm, config.rope_theta, config.head_dim) == (True, False, 640_000.0, 128)
    assert config_to_hf(config)["model_type"] == "qwen2"
    fields = config_to_hf(config, "mimo")
    assert (fields["model_type"], fields["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    assert config_from_hf(fields) == config_from_hf(config_to_hf(config)) == config
    assert config_to_hf(config_from_hf(QWEN3_8B), "mimo")["model_type"] == "qwen3"
    assert not carried_fields(MIMO_7B).keys() & {"auto_map", "num_nextn_predict_layers"}


@pytest.mark.parametrize("fields", PUBLISHED, ids=lambda fields: fields["model_type"])
def test_transformers_5_and_export_mean_the_same(fields: dict[str, Any]):
    config = config_from_hf(fields)
    assert config_from_hf(as_transformers_5(fields)) == config
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf({**carried_fields(fields), **config_to_hf(config)}) == config


def test_what_may_be_absent():
    absent = dict(
        num_key_value_heads=..., head_dim=..., rope_theta=..., rope_scaling=..., torch_dtype=..., architectures=...
    )
    config = config_from_hf(changed(LLAMA32_1B, **absent, tie_word_embeddings=...))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.dtype) == (32, 64, 10_000.0, "float32")
    assert not config.tie_embeddings
    assert config_from_hf(changed(LLAMA32_1B, num_key_value_heads=None)).num_kv_heads == 32


def windows(**changes: Any) -> dict[str, Any]:
    """As Qwen3 says it, on the shape of the Llama."""
    said = dict(use_sliding_window=True, sliding_window=8, max_window_layers=12)
    return {"model_type": "qwen3", "architectures": ..., **said, **changes}


MIXED = ["full_attention", "sliding_attention"] * 8


@pytest.mark.parametrize(
    ("said", "window", "within"),
    [
        (windows(), 8, (12, 13, 14, 15)),
        (windows(max_window_layers=0), 8, None),
        (windows(max_window_layers=16), None, None),
        (windows(sliding_window=None), None, None),
        (windows(layer_types=MIXED), 8, tuple(range(1, 16, 2))),
        (windows(model_type="qwen2", layer_types=MIXED), 8, tuple(range(1, 16, 2))),
        ({"model_type": "mistral", "architectures": ..., "sliding_window": 8}, 8, None),
        ({"model_type": "mistral", "architectures": ..., "sliding_window": None}, None, None),
    ],
)
def test_sliding_windows(said: dict[str, Any], window: int | None, within: tuple[int, ...] | None) -> None:
    fields = changed(LLAMA32_1B, **said)
    config = config_from_hf(fields)
    assert (config.sliding_window, config.sliding_layers) == (window, within)
    expected = tuple(window if window and i in (within or range(16)) else None for i in range(16))
    assert config.windows == expected
    assert config_from_hf({**carried_fields(fields), **config_to_hf(config)}) == config


def test_no_family_has_these_windows() -> None:
    config = replace(config_from_hf(LLAMA32_1B), sliding_window=8, sliding_layers=(1,))
    with pytest.raises(ValueError, match=r"^sliding_layers = \(1,\): llama and mistral have none, or no others$"):
        config_to_hf(config)
    assert config_to_hf(replace(config, sliding_layers=None))["model_type"] == "mistral"
    for options, message in (
        (dict(sliding_window=None), r"sliding_layers = \(1,\): must be none without sliding_window"),
        (dict(sliding_window=0), "sliding_window = 0: must be at least 1"),
        (dict(sliding_layers=(16,)), r"sliding_layers = \(16,\): must be distinct, ascending and within 0 .. 15"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            replace(config, **options)


def test_carried_fields():
    assert carried_fields(changed(QWEN3_8B, pad_token_id=3)) == {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "initializer_range": 0.02,
        "max_window_layers": 36,
        "pad_token_id": 3,
        "sliding_window": None,
        "use_cache": True,
    }


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": changed(LLAMA32_1B["rope_scaling"], **changes)}


UNKNOWN = "unknown field, refused because it may change the forward"
REFUSED = [
    ({"model_type": "mixtral"}, 'model_type = "mixtral": must be "qwen3" or "qwen2" or "llama"'),
    ({"model_type": ...}, 'model_type: missing, must be "qwen3" or "qwen2" or "llama"'),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        'architectures = "LlamaForSequenceClassification": must be "LlamaForCausalLM"',
    ),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
    ({"attention_bias": True}, "attention_bias = true: must be false"),
    ({"model_type": "qwen3", "architectures": ..., "attention_bias": True}, "attention_bias = true: must be false"),
    ({"mlp_bias": True}, "mlp_bias = true: must be false"),
    ({"mlp_bias": 0}, "mlp_bias = 0: must be false"),
    ({"use_mrope": True}, "use_mrope = true: must be false"),
    ({"use_sliding_window": True}, "use_sliding_window = true: must be false"),
    ({"model_type": "mistral", "architectures": ...}, "sliding_window: missing, must be null or a positive integer"),
    (windows(max_window_layers=...), "max_window_layers = null: must be the first layer with a sliding window"),
    (windows(sliding_window="8"), 'sliding_window = "8": must be a positive integer'),
    (windows(layer_types=["sliding_attention"]), 'layer_types = ["sliding_attention"]: must name num_hidden_layers = '),
    (windows(layer_types=["chunked_attention"]), 'layer_types = "chunked_attention": must be "full_attention" or '),
    (
        windows(use_sliding_window=False, layer_types=["sliding_attention"] * 16),
        'layer_types = "sliding_attention": must be "full_attention"',
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        'layer_types = "sliding_attention": must be "full_attention"',
    ),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1: must be 0"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}: must be null'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be null or 1"),
    (rope(partial_rotary_factor=0.5), "rope_scaling.partial_rotary_factor = 0.5: must be null or 1"),
    (rope(rope_type="longrope"), 'rope_scaling.rope_type = "longrope": must be "default" or "linear" or "llama3" or '),
    (rope(attention_factor=1.5), f"rope_scaling.attention_factor = 1.5: {UNKNOWN}"),
    (rope(rope_type="default"), f"rope_scaling.factor = 32.0: {UNKNOWN}"),
    (rope(factor=...), "rope_scaling.factor = null: must be a positive number"),
    (rope(high_freq_factor=1), "rope_scaling.high_freq_factor = 1.0: must be above rope_scaling.low_freq_factor = 1.0"),
    (
        rope(original_max_position_embeddings=8192.5),
        "rope_scaling.original_max_position_embeddings = 8192.5: must be a positive integer",
    ),
    (rope(rope_theta=1.0), "rope_scaling.rope_theta = 1.0: contradicts rope_theta = 500000.0"),
    (
        {"rope_parameters": {"rope_type": "default"}},
        'rope_parameters = {"rope_type": "default"}: contradicts rope_scaling = {"factor": 32.0, ',
    ),
    ({"rope_scaling": "llama3"}, 'rope_scaling = "llama3": must be an object'),
    ({"rope_theta": "1e6"}, 'rope_theta = "1e6": must be a positive number'),
    ({"torch_dtype": "float16"}, 'torch_dtype = "float16": must be "float32" or "bfloat16"'),
    ({"dtype": "float32"}, 'dtype = "float32": contradicts torch_dtype = "bfloat16"'),
    ({"hidden_size": ...}, "hidden_size = null: must be a positive integer"),
    ({"num_hidden_layers": "16"}, 'num_hidden_layers = "16": must be a positive integer'),
    ({"vocab_size": True}, "vocab_size = true: must be a positive integer"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps = Infinity: must be a positive number"),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes": must be false or true'),
    ({"num_key_value_heads": 5}, "num_kv_heads = 5: must divide num_heads = 32"),
    ({"logit_scale": 0.5}, f"logit_scale = 0.5: {UNKNOWN}"),
    ({"sliding_windows": list(range(99))}, "sliding_windows = [0, 1, 2, "),
    ({"num_hidden_layers": 4}, "num_layers = 4: below 7 layers feature_layers must be given"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=lambda case: next(iter(case)) if isinstance(case, dict) else ""
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(LLAMA32_1B, **changes)))
    with pytest.raises(ValueError) as error:
        read_hf_config(tmp_path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_refused_files(tmp_path: Path):
    path = tmp_path / "config.json"
    for text, message in [
        (None, "No such file or directory"),
        ("{", "not JSON (.*)"),
        ("[]", "must hold a JSON object"),
    ]:
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=f"config.json: {message}$"):
            read_hf_config(tmp_path)


def test_no_family_has_both():
    with pytest.raises(ValueError, match="^qk_norm = True, qkv_bias = True: no supported family has both$"):
        config_to_hf(replace(config_from_hf(QWEN3_8B), qkv_bias=True))


@pytest.mark.parametrize("fields", PUBLISHED, ids=lambda fields: fields["model_type"])
def test_transformers_reads_the_export(tmp_path: Path, fields: dict[str, Any]):
    """The installed transformers finds in an exported config.json what it finds in the published one."""
    transformers = pytest.importorskip("transformers")
    exported = {**carried_fields(fields), **config_to_hf(config_from_hf(fields))}
    found = []
    for name, content in {"published": fields, "exported": exported}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        found.append(transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict())
    for config in found:
        config.pop("_name_or_path", None)
        config.pop("transformers_version")
        config.pop("use_mrope", None)  # of no model that reads it; false says nothing
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert found[0] == found[1]
