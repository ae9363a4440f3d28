"""Tensors of block drafts by their public names, which all dialects share."""

from models.drafts.block import BlockConfig
from models.hf.layout import HEAD, Stored, block_tensors, linear, norm


def block_draft_tensors(config: BlockConfig) -> dict[str, Stored]:
    """Return the tensors that hold parameters: all but vocabulary maps and copies of the policy's."""
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
