"""Network sheets count what the networks have, and published shapes are those of the published configs."""

import math
from functools import partial
from typing import Any

import jax
import pytest
from flax.linen import unbox

from models.config import DecoderConfig, ExpertsConfig
from models.decoder import init_decoder
from models.drafts.block import block_like, init_block
from models.drafts.eagle3 import init_eagle3
from models.drafts.mtp import init_mtp, mtp_config
from models.hf.config import config_from_hf
from models.published import DECODERS, eagle3_config
from models.sheets import block_sheet, decoder_sheet, eagle3_sheet, mtp_sheet
from tests.models.test_hf_config import PUBLISHED

BILLION = 1e9
SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=12, intermediate_size=20, num_layers=7, num_heads=4, num_kv_heads=2, head_dim=6
)
EXPERTS = ExpertsConfig(num_experts=5, active=2, intermediate_size=8, layers=(1, 4))


def matrices(init: Any) -> int:
    """Return the parameters of all matrices of a network but its embedding."""
    shapes = unbox(jax.eval_shape(init, jax.random.key(0)))
    shapes.pop("embed", None)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes) if len(x.shape) > 1)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_a_decoder_multiplies_by_what_it_has(experts: ExpertsConfig | None):
    config = DecoderConfig(**SIZES, experts=experts)
    assert decoder_sheet(config).parameters == matrices(partial(init_decoder, config))


def test_heads_multiply_by_what_they_have():
    config = eagle3_config("qwen3-0.6b", draft_vocab_size=100)
    sheet = eagle3_sheet(config)
    assert sheet.network.parameters + sheet.fused == matrices(partial(init_eagle3, config))
    policy = DecoderConfig(**SIZES, feature_layers=(1, 2))
    block = block_like(policy, 3, num_layers=2, markov_rank=5, draft_vocab_size=30)
    sheet = block_sheet(block)
    assert sheet.markov is not None
    # The Markov head looks one row up in its first table.
    multiplied = sheet.network.parameters + sheet.fused + sheet.markov.parameters
    assert multiplied == matrices(partial(init_block, block)) - 40 * 5
    mtp = mtp_config(DecoderConfig(**SIZES), "deepseek_v3")
    assert mtp_sheet(mtp).network.parameters == matrices(partial(init_mtp, mtp))


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_shapes_are_those_of_config_json(name: str):
    assert DECODERS[name] == config_from_hf(PUBLISHED[name.replace("-", "_")])


@pytest.mark.parametrize(
    "name, parameters, cached, head",
    [
        ("qwen3-8b", 8.19, 144, 0.349),
        ("qwen3-30b-a3b", 30.53, 96, 0.170),
        ("qwen3-235b-a22b", 235.09, 188, 0.542),
        ("llama-3.1-8b", 8.03, 128, 0.374),
    ],
)
def test_published_sizes(name: str, parameters: float, cached: int, head: float):
    """Parameters with the embedding, KiB of a cached position, and parameters of SpecForge's head without `fc`."""
    sheet, draft = decoder_sheet(DECODERS[name]), eagle3_sheet(eagle3_config(name))
    assert (sheet.parameters + sheet.head) / BILLION == pytest.approx(parameters, abs=0.005)
    assert sheet.cache_bytes(2) == cached * 1024
    assert draft.network.parameters / BILLION == pytest.approx(head, abs=0.0005)
