"""The `config.json` of EAGLE-3 heads."""

from collections.abc import Mapping
from typing import Any

from models.drafts.eagle3 import Eagle3Config
from models.hf.config import config_from_hf
from models.hf.drafts.dialects import EAGLE3_FLAGS, FORMATS, Dialect, layer_fields, speculators_fields, split_fields
from models.hf.drafts.stated_policy import StatedPolicy
from models.json_fields import boolean, check, integer, layer_ids, one_of, show, texts


def eagle3_from_public(fields: Mapping[str, Any], name: str) -> tuple[Eagle3Config, tuple[int, ...]]:
    """Return the head that a `config.json` describes, and the policy's layers that it reads on entry.

    The layers are empty if the file does not state them: EAGLE-3's defaults apply. See `draft_from_public` for errors.

    name: of its format, one of FORMATS.
    """
    if name == "specforge":
        one_of(fields, "model_type", ("llama",))
        one_of(fields, "num_hidden_layers", (1,))
    form = FORMATS[name]
    own, layer = split_fields(fields, form)
    layers, reads_layers = layer_ids(own, form.layers, form.offset), boolean(own, "use_aux_hidden_state")
    flags: dict[str, Any] = {name: boolean(own, name) for name in EAGLE3_FLAGS}
    # A head always has its own lm_head.
    removed = {"architectures", "tie_word_embeddings"}
    kinds = texts(layer, "layer_types") or ["full_attention"]
    if len(set(kinds)) > 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer_types = {show(kinds)}: must be all full_attention or all sliding_attention")
    sliding = kinds[0] == "sliding_attention"
    window = integer(layer, "sliding_window") if sliding else None
    if sliding:  # heads have windows even in families whose policies have none
        removed |= {"layer_types", "use_sliding_window"}
    decoder = config_from_hf({name: value for name, value in layer.items() if name not in removed}, ())
    check("model_type", layer["model_type"], ("llama", "qwen3"))
    if len(set(decoder.windows)) > 1:
        first_sliding = layer["max_window_layers"]
        raise ValueError(f"max_window_layers = {first_sliding}: must leave all {decoder.num_layers} layers alike")
    config = Eagle3Config(
        **decoder.layer_options(),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=integer(own, "draft_vocab_size", default=decoder.vocab_size),
        feature_size=decoder.hidden_size * (len(layers or (0, 1, 2)) if reads_layers else 1),
        max_positions=decoder.max_positions,
        num_layers=decoder.num_layers,
        sliding_window=window if sliding else decoder.windows[0],
        use_aux_hidden_state=reads_layers,
        **flags,
    )
    return config, layers if reads_layers else ()


def eagle3_to_public(
    config: Eagle3Config, layers: tuple[int, ...], dialect: Dialect, policy: StatedPolicy
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect. Raises ValueError if it cannot describe the head."""
    if dialect in ("zlab", "deepspec"):
        raise ValueError(f"kind: {dialect} has block drafts only; write the dialect specforge or speculators")
    flags = {name: getattr(config, name) for name in EAGLE3_FLAGS}
    if dialect == "speculators":
        if not config.use_aux_hidden_state:
            raise ValueError("use_aux_hidden_state = False: not supported by speculators; write the dialect specforge")
        layer = layer_fields(config)
        # Engines read the window of a head without the switch that policies of its family have.
        if config.sliding_window is not None:
            layer["sliding_window"] = config.sliding_window
            layer["layer_types"] = ["sliding_attention"] * config.num_layers
        proposal = dict(speculative_tokens=3, verifier_accept_k=1, accept_tolerance=0.0)
        common = speculators_fields(config, layers, policy, layer, proposal)
        return {**common, **flags, "embed_requires_grad": False, "target_hidden_size": None}
    for name in ("num_layers", "qk_norm", "sliding_window", "norm_before_fc", "norm_before_residual"):
        if (value := getattr(config, name)) != Eagle3Config.__dataclass_fields__[name].default:
            raise ValueError(f"{name} = {value}: not supported by specforge; write the dialect speculators")
    if 0 in layers:
        raise ValueError(
            f"feature_layers = {layers}: specforge cannot express the input of layer 0; write the dialect speculators"
        )
    form, own = FORMATS[dialect], {name: value for name, value in flags.items() if value}
    eagle: dict[str, Any] = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if layers:
        eagle[form.layers] = [i - form.offset for i in layers]
    own |= {"architectures": [form.architecture], "draft_vocab_size": config.draft_vocab_size, "eagle_config": eagle}
    return layer_fields(config) | own
