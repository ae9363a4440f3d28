"""The tensors of EAGLE-3 heads by their public names, in the dialects of `models.hf.eagle3_dialects`."""

from models.drafts.eagle3 import Eagle3Config
from models.hf.eagle3_dialects import Dialect
from models.hf.layout import HEAD, LINEAR, VECTOR, Stored, block_tensors

EMBEDDING, TO_TARGET, TO_DRAFT = "embed_tokens.weight", "d2t", "t2d"


def eagle3_tensors(config: Eagle3Config, dialect: Dialect) -> dict[str, Stored]:
    """The tensors that parameters are made of: all but those of the vocabularies."""
    tensors = first_layer(config, "midlayer." if dialect == "specforge" else "layers.0.")
    for i in range(1, config.num_layers):
        tensors |= block_tensors(config, f"layers.{i}.", f"layer_{i - 1}")
    if config.use_aux_hidden_state:
        tensors["fc.weight"] = Stored(("fc", "kernel"), LINEAR)
    if config.norm_before_fc:
        tensors["input_norm.weight"] = Stored(("features_norm", "scale"), VECTOR)
    for i in range(config.feature_size // config.hidden_size) if config.fc_norm else ():
        tensors[f"fc_norm.{i}.weight"] = Stored((f"feature_norm_{i}", "scale"), VECTOR)
    return tensors | {"norm.weight": Stored(("norm", "scale"), VECTOR), HEAD: Stored(("head", "kernel"), LINEAR)}


def first_layer(config: Eagle3Config, prefix: str) -> dict[str, Stored]:
    """A decoder block's tensors, whose parameters stand by themselves in the tree of a head, with a second norm."""
    block = block_tensors(config, prefix, "")
    tensors = {name: Stored(stored.path[1:], stored.axes) for name, stored in block.items()}
    norms = {"input_layernorm": "input_norm", "hidden_norm": "hidden_norm"}
    return tensors | {f"{prefix}{name}.weight": Stored((path, "scale"), VECTOR) for name, path in norms.items()}
