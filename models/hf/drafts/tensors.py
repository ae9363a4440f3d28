"""Tensors of EAGLE-3 heads and block drafts by their public names."""

from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.hf.drafts.dialects import Dialect
from models.hf.layout import HEAD, Stored, block_tensors, linear, norm


def draft_tensors(config: Eagle3Config | BlockConfig, dialect: Dialect) -> dict[str, Stored]:
    """Return the tensors that hold parameters: all but vocabulary maps and copies of the policy's tables."""
    return _block_draft(config) if isinstance(config, BlockConfig) else _eagle3(config, dialect)


def _eagle3(config: Eagle3Config, dialect: Dialect) -> dict[str, Stored]:
    first_layer = "midlayer." if dialect == "specforge" else "layers.0."
    # The first layer's parameters are at the root of the tree, and each of its two inputs has a norm.
    block = block_tensors(config, first_layer, "").items()
    tensors = {name: Stored(stored.path[1:], stored.axes) for name, stored in block}
    tensors[f"{first_layer}input_layernorm.weight"] = norm("input_norm")
    tensors[f"{first_layer}hidden_norm.weight"] = norm("hidden_norm")
    for i in range(1, config.num_layers):
        tensors |= block_tensors(config, f"layers.{i}.", f"layer_{i - 1}")
    if config.use_aux_hidden_state:
        tensors["fc.weight"] = linear("fc")
    if config.norm_before_fc:
        tensors["input_norm.weight"] = norm("features_norm")
    for i in range(config.feature_size // config.hidden_size) if config.fc_norm else ():
        tensors[f"fc_norm.{i}.weight"] = norm(f"feature_norm_{i}")
    return tensors | {"norm.weight": norm("norm"), HEAD: linear("head")}


def _block_draft(config: BlockConfig) -> dict[str, Stored]:
    tensors = {"fc.weight": linear("fc"), "hidden_norm.weight": norm("hidden_norm"), "norm.weight": norm("norm")}
    for i in range(config.num_layers):
        tensors |= block_tensors(config, f"layers.{i}.", f"layer_{i}")
    if config.markov_rank:
        tensors["markov_head.markov_w1.weight"] = Stored(("predecessor",), ((0,), (1,)))
        tensors["markov_head.markov_w2.weight"] = linear("successor")
    if config.enable_confidence_head:
        tensors["confidence_head.proj.weight"] = linear("confidence")
        tensors["confidence_head.proj.bias"] = Stored(("confidence", "bias"), ((0,),))
    if config.own_head:
        tensors[HEAD] = linear("head")
    return tensors
