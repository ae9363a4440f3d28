"""The networks of a preset with random weights, the prompts put to them, and programs compiled against the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.presets import Preset
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.params import init_params
from specjax.drafters import Drafter
from specjax.generate import prepare
from specjax.mesh import MeshConfig, decoding_options, make_mesh
from specjax.types import Params, Policy, Prompts


@dataclass(frozen=True)
class Networks:
    """A policy and its drafter on one device, `params` in the compute dtype."""

    decoder: DecoderConfig
    policy: Policy
    drafter: Drafter
    params: Params


def random_networks(preset: Preset) -> Networks:
    """Fresh weights: what a round costs does not hang on them, and acceptance is forced."""
    decoder = preset.decoder
    head = Eagle3Config(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        rope_theta=decoder.rope_theta,
        dtype=decoder.dtype,
        param_dtype=decoder.param_dtype,
        feature_size=decoder.hidden_size * len(decoder.feature_layers),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=preset.draft_vocab or decoder.vocab_size,
    )
    policy, mesh = make_policy(decoder), make_mesh(MeshConfig())
    ids = None if preset.draft_vocab is None else np.arange(preset.draft_vocab, dtype=np.int32)
    drafter, keys = make_eagle3(head, policy, ids), jax.random.split(jax.random.key(0))
    params = Params(
        policy=init_params(partial(init_decoder, decoder), keys[0], mesh),
        draft=init_params(partial(init_eagle3, head), keys[1], mesh),
    )
    return Networks(decoder, policy, drafter, prepare(params, policy, drafter))


def as_trained(networks: Networks) -> Params:
    """The parameters as they are trained and saved: without what decoding lays out anew."""
    params, tied = networks.params, networks.decoder.tie_embeddings
    return replace(params, policy={name: x for name, x in params.policy.items() if not (tied and name == "head")})


def random_prompts(networks: Networks, rows: int, length: int) -> Prompts:
    """Prompts of one length, of tokens at random."""
    tokens = np.random.default_rng(0).integers(1, networks.policy.vocab_size, (rows, length), dtype=np.int32)
    return Prompts(jnp.asarray(tokens), jnp.full(rows, length, jnp.int32), jnp.arange(rows, dtype=jnp.int32))


def compiled(
    function: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> tuple[Callable[..., Any], float]:
    """The program for arguments like these, with `options` over those of decoding, and the seconds of making it."""
    start = time.perf_counter()
    chosen = decoding_options() | (options or {})
    program = jax.jit(function, donate_argnums=donate, compiler_options=chosen).lower(*args).compile()
    return program, time.perf_counter() - start
