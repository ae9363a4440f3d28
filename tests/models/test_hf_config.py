import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.config import DecoderConfig, ExpertsConfig
from models.hf.config import carried_fields, config_from_hf, config_to_hf, read_hf_config
from models.rope import Llama3Scaling
from tests.refusals import refuses

# Published config.json files, written by transformers 4. MiMo has the blocks of Qwen2.5 and an MTP layer.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
QWEN3_8B, LLAMA32_1B, MIMO_7B = (PUBLISHED[name] for name in ("qwen3_8b", "llama32_1b", "mimo_7b"))
EXPERTS = PUBLISHED["qwen3_30b_a3b"] | {"num_hidden_layers": 8}
PLAIN = [name for name in PUBLISHED if name != "mimo_7b"]
SIZES = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim".split()


def as_transformers_5(fields: dict[str, Any]) -> dict[str, Any]:
    fields = dict(fields)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), **(fields.pop("rope_scaling", None) or {})}
    return {**fields, "rope_parameters": rope, "dtype": fields.pop("torch_dtype")}


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a config.json with these fields changed. The value ... removes a field."""
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def decoder(*sizes: int, **options: Any) -> DecoderConfig:
    return DecoderConfig(**dict(zip(SIZES, sizes, strict=True)), dtype="bfloat16", param_dtype="bfloat16", **options)


def test_published_configs():
    qwen3 = dict(qk_norm=True, rope_theta=1e6, max_positions=40_960, feature_layers=(2, 18, 33))
    assert config_from_hf(QWEN3_8B) == decoder(151_936, 4096, 12_288, 36, 32, 8, 128, **qwen3)
    qwen2 = dict(qkv_bias=True, rope_theta=1e6, max_positions=32_768, feature_layers=(2, 14, 25))
    assert config_from_hf(PUBLISHED["qwen25_7b"]) == decoder(152_064, 3584, 18_944, 28, 28, 4, 128, **qwen2)
    llama = dict(tie_embeddings=True, rope_theta=5e5, norm_eps=1e-5, max_positions=131_072, feature_layers=())
    llama["rope_scaling"] = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert config_from_hf(LLAMA32_1B, feature_layers=()) == decoder(128_256, 2048, 8192, 16, 32, 8, 64, **llama)


def test_published_mixtures():
    for name, layers, width in (("qwen3_30b_a3b", 48, 768), ("qwen3_235b_a22b", 94, 1536)):
        config, sizes = config_from_hf(PUBLISHED[name]), dict(num_experts=128, active=8, intermediate_size=width)
        assert config.experts == ExpertsConfig(**sizes, norm_topk_prob=True, layers=None)
        assert (config.num_layers, config.num_kv_heads, config.qk_norm) == (layers, 4, True)
        assert config.expert_layers == tuple(range(layers))


def test_which_layers_have_experts():
    assert config_from_hf(changed(EXPERTS, decoder_sparse_step=2)).expert_layers == (1, 3, 5, 7)
    mixed = config_from_hf(changed(EXPERTS, decoder_sparse_step=2, mlp_only_layers=[0, 3]))
    assert mixed.expert_layers == (1, 5, 7)
    again = config_to_hf(mixed)
    assert (again["model_type"], again["mlp_only_layers"]) == ("qwen3_moe", [0, 2, 3, 4, 6])
    assert config_from_hf(again) == mixed


def test_mimo_is_qwen2_but_in_name():
    config = config_from_hf(MIMO_7B)
    assert (config.qkv_bias, config.qk_norm, config.rope_theta, config.head_dim) == (True, False, 640_000.0, 128)
    assert config_to_hf(config)["model_type"] == "qwen2"
    fields = config_to_hf(config, "mimo")
    assert (fields["model_type"], fields["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    assert config_from_hf(fields) == config_from_hf(config_to_hf(config)) == config
    assert config_to_hf(config_from_hf(QWEN3_8B), "mimo")["model_type"] == "qwen3"
    assert not carried_fields(MIMO_7B).keys() & {"auto_map", "num_nextn_predict_layers"}


@pytest.mark.parametrize("name", PLAIN)
def test_transformers_5_and_export_mean_the_same(name: str):
    fields = PUBLISHED[name]
    config = config_from_hf(fields)
    assert config_from_hf(as_transformers_5(fields)) == config
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf({**carried_fields(fields), **config_to_hf(config)}) == config


def test_optional_fields():
    absent = "num_key_value_heads head_dim rope_theta rope_scaling torch_dtype architectures tie_word_embeddings"
    config = config_from_hf(changed(LLAMA32_1B, **dict.fromkeys(absent.split(), ...)))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.dtype) == (32, 64, 10_000.0, "float32")
    assert not config.tie_embeddings
    assert config_from_hf(changed(LLAMA32_1B, num_key_value_heads=None)).num_kv_heads == 32
    other = changed(EXPERTS, num_experts=..., num_local_experts=64, norm_topk_prob=..., mlp_only_layers=None)
    experts = config_from_hf(other).experts
    assert experts is not None and (experts.num_experts, experts.norm_topk_prob) == (64, False)


def windows(**changes: Any) -> dict[str, Any]:
    """Return the Llama's config with sliding-window fields in Qwen3's form."""
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


def test_options_that_no_family_has() -> None:
    with refuses("qk_norm = True, qkv_bias = True: "):
        config_to_hf(replace(config_from_hf(QWEN3_8B), qkv_bias=True))
    config = replace(config_from_hf(LLAMA32_1B), sliding_window=8, sliding_layers=(1,))
    with refuses("sliding_layers = (1,):"):
        config_to_hf(config)
    assert config_to_hf(replace(config, sliding_layers=None))["model_type"] == "mistral"
    for options in ({"sliding_layers": (1,), "sliding_window": None}, {"sliding_window": 0}, {"sliding_layers": (16,)}):
        with refuses("{} = {}: ".format(*next(iter(options.items())))):
            replace(config, **options)


def test_carried_fields():
    fields = changed(QWEN3_8B, pad_token_id=3)
    carried = "bos_token_id eos_token_id initializer_range max_window_layers pad_token_id sliding_window use_cache"
    assert carried_fields(fields) == {name: fields[name] for name in carried.split()}


def test_additional_fields_of_smollm2_change_nothing():
    """The fields are those of HuggingFaceTB/SmolLM2-135M-Instruct, and those that transformers adds for a GGUF file."""
    formats = {"kv_cache_dtype": {"q4f16": "float16"}}
    added = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": formats, "unk_token_id": 0}
    fields = changed(LLAMA32_1B, **added, _model_name_or_path="Smollm2 135M 8k Lc100K Mix1 Ep2")
    assert config_from_hf(fields) == config_from_hf(LLAMA32_1B)


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": changed(LLAMA32_1B["rope_scaling"], **changes)}


FULL_ALONE = 'layer_types = "sliding_attention": ..."full_attention"'
REFUSED = [
    ({"model_type": "mixtral"}, 'model_type = "mixtral": ..."qwen3"..."qwen2"..."llama"'),
    ({"model_type": ...}, "model_type: "),
    ({"architectures": ["LlamaModel"]}, 'architectures = "LlamaModel": ..."LlamaForCausalLM"'),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu": ..."silu"'),
    ({"attention_bias": True}, "attention_bias = true: ...false"),
    ({"model_type": "qwen3", "architectures": ..., "attention_bias": True}, "attention_bias = true: ...false"),
    ({"mlp_bias": 0}, "mlp_bias = 0: ...false"),
    ({"rope_interleaved": True}, "rope_interleaved = true: ...false"),
    ({"use_mrope": True}, "use_mrope = true: ...false"),
    ({"use_sliding_window": True}, "use_sliding_window = true: ...false"),
    ({"model_type": "mistral", "architectures": ...}, "sliding_window: "),
    (windows(max_window_layers=...), "max_window_layers = null: "),
    (windows(sliding_window="8"), 'sliding_window = "8": '),
    (windows(layer_types=["sliding_attention"]), 'layer_types = ["sliding_attention"]: ...num_hidden_layers = '),
    (windows(layer_types=["chunked_attention"]), 'layer_types = "chunked_attention": ..."full_attention"'),
    (windows(use_sliding_window=False, layer_types=["sliding_attention"] * 16), FULL_ALONE),
    ({"layer_types": ["full_attention", "sliding_attention"]}, FULL_ALONE),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1: ...0"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}: ...null'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: ...null...1"),
    (rope(partial_rotary_factor=0.5), "rope_scaling.partial_rotary_factor = 0.5: ...null...1"),
    (rope(rope_type="default"), "rope_scaling.factor = 32.0: "),
    (rope(rope_theta=1.0), "rope_scaling.rope_theta = 1.0: ...rope_theta = 500000.0"),
    ({"rope_parameters": {"rope_type": "default"}}, 'rope_parameters = {"rope_type": "default"}: '),
    ({"rope_scaling": "llama3"}, 'rope_scaling = "llama3": '),
    ({"rope_theta": "1e6"}, 'rope_theta = "1e6": '),
    ({"torch_dtype": "float64"}, 'torch_dtype = "float64": ..."float32"..."bfloat16"'),
    ({"dtype": "float32"}, 'dtype = "float32": ...torch_dtype = "bfloat16"'),
    ({"hidden_size": ...}, "hidden_size = null: "),
    ({"num_hidden_layers": "16"}, 'num_hidden_layers = "16": '),
    ({"vocab_size": True}, "vocab_size = true: "),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps = Infinity: "),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes": ...true...false'),
    ({"num_key_value_heads": 5}, "num_kv_heads = 5: ...num_heads = 32"),
    ({"logit_scale": 0.5}, "logit_scale = 0.5: "),
    ({"sliding_windows": list(range(99))}, "sliding_windows = [0, 1, 2, "),
]


REFUSED_EXPERTS = [
    (dict(num_local_experts=64), "num_experts = 128: ...num_local_experts = 64"),
    (dict(num_experts=...), "num_local_experts = null: must be a positive integer"),
    (dict(num_experts_per_tok=129), "active = 129: "),
    (dict(moe_intermediate_size=...), "moe_intermediate_size = null: "),
    (dict(mlp_only_layers=list(range(8))), "mlp_only_layers = [0, 1, 2, 3, 4, 5, 6, 7]: "),
    (dict(decoder_sparse_step=0), "decoder_sparse_step = 0: "),
    (dict(norm_topk_prob=1), "norm_topk_prob = 1: "),
    (dict(use_sliding_window=True), "use_sliding_window = true: "),
    (dict(model_type="qwen3", architectures=...), "decoder_sparse_step = 1: unknown field"),
    (dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size = 8: unknown field"),
]
CASES = [*((LLAMA32_1B, *case) for case in REFUSED), *((EXPERTS, *case) for case in REFUSED_EXPERTS)]


@pytest.mark.parametrize(("fields", "changes", "message"), CASES, ids=[next(iter(changes)) for _, changes, _ in CASES])
def test_refused(tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(fields, **changes)))
    with refuses(f"{path}: {message}"):
        read_hf_config(tmp_path)


def test_refused_files(tmp_path: Path):
    path = tmp_path / "config.json"
    for text, message in ((None, "No such file"), ("{", "not JSON"), ("[]", "...JSON object")):
        if text is not None:
            path.write_text(text)
        with refuses(f"{path}: {message}"):
            read_hf_config(tmp_path)


@pytest.mark.parametrize("name", PLAIN)
def test_transformers_reads_the_export(tmp_path: Path, name: str):
    """The installed transformers reads the same values from an exported config.json as from the published one."""
    transformers, fields = pytest.importorskip("transformers"), PUBLISHED[name]
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
