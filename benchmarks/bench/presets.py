"""Presets: network shapes, and the batches, contexts and draft lengths to measure them at."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from models.config import DecoderConfig, Remat, block_feature_layers, eagle3_feature_layers
from models.drafts.block import BlockConfig, block_like
from models.drafts.eagle3 import Eagle3Config, eagle3_like
from models.published import DECODERS
from specjax.options import DraftLength, Fraction, Options, Positive


@dataclass(frozen=True)
class LongTail(Options):
    """Long-tailed completion lengths: one in `every` is `factor` times the median, the others are near the median.

    Attributes:
        median: median length in tokens.
        factor: length of a long completion over the median.
        every:  one completion in this many is long.
    """

    median: Positive
    factor: Positive = 8
    every: Positive = 16

    @property
    def longest(self) -> int:
        return self.factor * self.median


@dataclass(frozen=True, kw_only=True)
class Preset(Options):
    """Networks with random weights, and the grid over which each section measures them.

    Attributes:
        decoder:       shape of the policy.
        draft_vocab:   vocabulary size of the EAGLE-3 head, with the policy's widths. None: the policy's vocabulary.
        batches:       rows decoded together.
        contexts:      positions that each row attends to.
        verified:      tokens in one verification; the first must be 1, the baseline.
        draft_lengths: draft lengths above 0.
        rates:         forced acceptance: probability that a drafted token is accepted, given that those before it are.
        batch:         rows in the sections that do not vary the batch.
        prompt:        tokens of a prompt, in sections that generate completions.
        new:           tokens of a completion in these sections.
        peer_batches:  rows in the comparison with other samplers.
        peer_rate:     acceptance forced in that comparison.
        tail:          completion lengths in the sections layout and rollouts.
        gradients:     True if gradients fit in memory beside the weights. The ladder is measured only then.
        trained:       tokens of a batch in the section update.
        remats:        what its backward pass recomputes; the first is measured first.
        rounds:        rounds in one measurement.
        repeats:       measurements of each variant, interleaved with the others.
    """

    decoder: DecoderConfig
    draft_vocab: Positive | None = None
    batches: tuple[Positive, ...]
    contexts: tuple[Positive, ...]
    verified: tuple[Positive, ...] = (1, 2, 4, 6, 8)
    draft_lengths: tuple[DraftLength, ...] = (1, 3, 5, 7)
    rates: tuple[Fraction, ...] = (0.6, 0.76, 0.8, 0.87)
    batch: Positive
    prompt: Positive
    new: Positive
    peer_batches: tuple[Positive, ...]
    peer_rate: Fraction = 0.8
    tail: LongTail
    gradients: bool = False
    trained: Positive
    remats: tuple[Remat, ...] = ("full", "dots")
    rounds: Positive = 8
    repeats: Positive = 5

    @property
    def head(self) -> Eagle3Config:
        """Return the EAGLE-3 head, with the policy's widths."""
        return eagle3_like(self.decoder, self.draft_vocab or self.decoder.vocab_size)

    @property
    def block_decoder(self) -> DecoderConfig:
        """Return the policy with the features that the block draft reads."""
        return replace(self.decoder, feature_layers=block_feature_layers(self.decoder.num_layers))

    @property
    def block(self) -> BlockConfig:
        """Return the block draft: DSpark in the published shape, with the policy's widths and vocabulary."""
        return block_like(self.block_decoder, block_size=7, markov_rank=256)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, **other: Any) -> DecoderConfig:
    return DecoderConfig(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        rope_theta=1e6,
        feature_layers=eagle3_feature_layers(layers),
        **other,
    )


@dataclass(frozen=True, kw_only=True)
class _Gpu(Preset):
    """Defaults of the presets for one GPU."""

    draft_vocab: Positive | None = 32_000
    batches: tuple[Positive, ...] = (1, 8, 32, 64, 256)
    contexts: tuple[Positive, ...] = (1024, 8192)
    batch: Positive = 16
    prompt: Positive = 512
    new: Positive = 512
    peer_batches: tuple[Positive, ...] = (1, 16, 64)
    tail: LongTail = field(default_factory=lambda: LongTail(median=256))
    trained: Positive = 32_768
    rounds: Positive = 32


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        decoder=_qwen3(2, 64, 128, 4, 2, 16, vocab_size=256, tie_embeddings=True),
        batches=(1, 4),
        contexts=(64, 128),
        verified=(1, 2, 4),
        draft_lengths=(1, 3),
        rates=(0.6, 0.8),
        batch=4,
        prompt=16,
        new=32,
        peer_batches=(1, 4),
        tail=LongTail(median=8),
        gradients=True,
        trained=512,
        rounds=4,
        repeats=3,
    ),
    "25m": Preset(
        decoder=_qwen3(8, 512, 1408, 8, 4, 64, vocab_size=4096, tie_embeddings=True),
        draft_vocab=1024,
        batches=(1, 4, 16, 64),
        contexts=(256, 1024),
        batch=4,
        prompt=64,
        new=128,
        peer_batches=(1, 4, 16),
        tail=LongTail(median=32),
        gradients=True,
        trained=2048,
    ),
} | {name: _Gpu(decoder=DECODERS[name]) for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")}
# Gradients of a part of the layers, whose weights leave room for long rows.
PRESETS["qwen3-8b-8-layers"] = _Gpu(
    decoder=replace(DECODERS["qwen3-8b"], num_layers=8, feature_layers=eagle3_feature_layers(8)), gradients=True
)


def find_preset(name: str | None) -> tuple[str, Preset]:
    """Return (name, preset). None selects 25m on a CPU, qwen3-8b elsewhere."""
    if name is None:
        name = "25m" if jax.default_backend() == "cpu" else "qwen3-8b"
    return name, PRESETS[name]
