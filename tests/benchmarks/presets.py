"""The smallest preset of benchmarks.bench, for tests."""

from dataclasses import replace

from benchmarks.bench.presets import PRESETS
from models.config import DecoderConfig

SHAPE = dict(hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
KINDS = dict(vocab_size=61, qk_norm=True, rope_theta=1e6, tie_embeddings=True, feature_layers=(0, 1))
CELLS = dict(batches=(2,), contexts=(8,), verified=(1, 3), draft_lengths=(2,), rates=(0.5,), peer_batches=(1,))
SIZES = dict(batch=2, prompt=4, new=6, rounds=2, repeats=2, trained=32, remats=("none",))
SMALL = replace(PRESETS["tiny"], decoder=DecoderConfig(**SHAPE, **KINDS), **CELLS, **SIZES)
