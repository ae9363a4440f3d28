"""Tunix (google-tunix), a JAX post-training library: its sampler with its own Qwen3."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.bench.peers.protocol import PeerCheckpoint, PeerSampler, Unsupported
from models.config import DecoderConfig
from specjax.parallel import processes

NAMES = ("Tunix",)
# Tunix hard-codes this rotary base in its attention and ignores its configuration.
ROPE_THETA = 1e6
# Id of padding and end of text. It is outside the vocabulary, so that no completion ends early.
NO_TOKEN = -1


class Numbers:
    """Tokenizer for Tunix whose texts are token ids separated by spaces."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return NO_TOKEN

    def pad_id(self) -> int:
        return NO_TOKEN


def load(checkpoint: PeerCheckpoint) -> tuple[PeerSampler, ...]:
    """Load the weights with Tunix's safetensors reader. Every cache length needs its own Tunix sampler."""
    sampling = importlib.import_module("tunix.generate.sampler")
    networks = importlib.import_module("tunix.models.qwen3.model")
    weights = importlib.import_module("tunix.models.qwen3.params")
    decoder = checkpoint.decoder
    if not decoder.qk_norm or decoder.qkv_bias or decoder.rope_theta != ROPE_THETA:
        raise Unsupported(f"only Qwen3 with rope_theta {ROPE_THETA:.0e}")
    model = weights.create_model_from_safe_tensors(
        str(checkpoint.directory), _config(networks, decoder), dtype=jnp.dtype(decoder.param_dtype)
    )
    samplers: dict[int, Any] = {}

    def generate(prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> np.ndarray:
        width, count = prompts.shape[1], int(lengths.max())
        if width + count not in samplers:
            cache = sampling.CacheConfig(width + count, decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
            samplers[width + count] = sampling.Sampler(model, Numbers(), cache)
        output = samplers[width + count](
            [" ".join(map(str, row)) for row in prompts.tolist()],
            max_generation_steps=count,
            max_prompt_length=width,
            temperature=1.0,
            top_p=None if greedy else 1.0,
            seed=0,
        )
        return np.stack([processes.fetch(row) for row in output.tokens])

    return (PeerSampler(generate),)


def _config(networks: Any, decoder: DecoderConfig) -> Any:
    return networks.ModelConfig(
        num_layers=decoder.num_layers,
        vocab_size=decoder.vocab_size,
        embed_dim=decoder.hidden_size,
        hidden_dim=decoder.intermediate_size,
        num_heads=decoder.num_heads,
        head_dim=decoder.head_dim,
        num_kv_heads=decoder.num_kv_heads,
        rope_theta=int(decoder.rope_theta),
        norm_eps=decoder.norm_eps,
        use_tied_embedding=decoder.tie_embeddings,
        dtype=jnp.dtype(decoder.dtype),
        param_dtype=jnp.dtype(decoder.param_dtype),
    )
