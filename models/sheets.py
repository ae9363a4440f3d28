"""Network sheets of our networks, for the cost model: the parameters that a forward multiplies by."""

from dataclasses import replace

from models.config import DecoderConfig, LayerConfig
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import MTPConfig
from specjax.cost.sheets import DraftSheet, NetworkSheet
from specjax.types import Mixture


def decoder_sheet(config: DecoderConfig) -> NetworkSheet:
    """Return the sheet of a decoder. Sliding windows count as full attention."""
    experts, layers = config.experts, len(config.expert_layers)
    dense = config.num_layers * _attention(config, config.hidden_size)
    dense += (config.num_layers - layers) * _mlp(config.hidden_size, config.intermediate_size)
    if experts is None:
        return _sheet(config, config.num_layers, dense, config.vocab_size)
    dense += layers * config.hidden_size * experts.num_experts  # the routers
    mixture = Mixture(layers, experts.num_experts, experts.active)
    expert = _mlp(config.hidden_size, experts.intermediate_size)
    return _sheet(config, config.num_layers, dense, config.vocab_size, mixture, expert)


def eagle3_sheet(config: Eagle3Config) -> DraftSheet:
    """Return the sheet of an EAGLE-3 head, whose first layer attends from embedding and feature side by side."""
    width, mlp = config.hidden_size, _mlp(config.hidden_size, config.intermediate_size)
    dense = _attention(config, 2 * width) + (config.num_layers - 1) * _attention(config, width)
    network = _sheet(config, config.num_layers, dense + config.num_layers * mlp, config.draft_vocab_size)
    return DraftSheet(network, config.feature_size * width if config.use_aux_hidden_state else 0)


def block_sheet(config: BlockConfig) -> DraftSheet:
    """Return the sheet of a block draft, whose one pass also projects the features of its context."""
    width = config.hidden_size
    dense = config.num_layers * (_attention(config, width) + _mlp(width, config.intermediate_size))
    markov = None
    if config.markov_rank:
        markov = _sheet(replace(config, hidden_size=config.markov_rank), 0, 0, config.draft_vocab_size)
    network = _sheet(config, config.num_layers, dense, config.draft_vocab_size)
    return DraftSheet(network, config.feature_size * width, block=True, markov=markov)


def mtp_sheet(config: MTPConfig) -> DraftSheet:
    """Return the sheet of an MTP head, which reads a vocabulary head of the policy's size, its own or the policy's."""
    width = config.hidden_size
    dense = _attention(config, width) + _mlp(width, config.intermediate_size) + 2 * width * width
    return DraftSheet(_sheet(config, 1, dense, config.vocab_size))


def _sheet(
    config: LayerConfig, layers: int, dense: int, vocab: int, mixture: Mixture | None = None, expert: int = 0
) -> NetworkSheet:
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return NetworkSheet(layers, config.hidden_size, dense, *heads, vocab, mixture, expert)


def _attention(config: LayerConfig, inputs: int) -> int:
    """Return the parameters of q, k, v and o. inputs: width that q, k and v read."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return inputs * (queries + 2 * keys) + queries * config.hidden_size


def _mlp(hidden: int, intermediate: int) -> int:
    return 3 * hidden * intermediate
