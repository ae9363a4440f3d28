"""Networks of a preset with random weights, and random prompts for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from benchmarks.bench.presets import Preset
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.block import init_block, make_block
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.params import init_params
from specjax.drafters import Drafter
from specjax.parallel.memory import bytes_per_device, check_memory, device_memory, growing
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.generate import prepare
from specjax.types import Params, Policy, Prompts, PyTree


@dataclass(frozen=True, eq=False)
class BenchNetworks:
    """A policy and its drafter with weights, on one device. Instances compare by identity.

    Attributes:
        decoder: the policy's shape.
        policy:  the policy as functions.
        drafter: its drafter.
        trained: parameters of both in the training dtype.
        mesh:    a mesh of one device.
    """

    decoder: DecoderConfig
    policy: Policy
    drafter: Drafter
    trained: Params
    mesh: Mesh

    @cached_property
    def params(self) -> Params:
        """Return the parameters prepared for rollouts (specjax.rollout.generate.prepare)."""
        return prepare(self.policy, self.drafter, self.trained)


class Functions(NamedTuple):
    """A policy and its drafter without weights, with the functions that initialise their parameters."""

    policy: Policy
    drafter: Drafter
    init_policy: Callable[[Key[Array, ""]], PyTree]
    init_draft: Callable[[Key[Array, ""]], PyTree]


def block_functions(preset: Preset) -> Functions:
    """Build the preset's decoder, with the features that its block draft reads, and that draft."""
    policy = make_policy(preset.block_decoder)
    inits = partial(init_decoder, preset.block_decoder), partial(init_block, preset.block)
    return Functions(policy, make_block(preset.block, policy), *inits)


def functions(preset: Preset) -> Functions:
    """Build the networks of a preset: a decoder, and an EAGLE-3 head with the decoder's widths."""
    decoder, head = preset.decoder, preset.head
    policy = make_policy(decoder)
    ids = None if preset.draft_vocab is None else np.arange(preset.draft_vocab, dtype=np.int32)
    drafter = make_eagle3(head, policy, ids)
    return Functions(policy, drafter, partial(init_decoder, decoder), partial(init_eagle3, head))


def check_grid(preset: Preset) -> None:
    """Raise ValueError if a device cannot hold the caches of the smallest batch at the shortest context."""
    rows, length = min(preset.batches), min(preset.contexts)
    sizes = {"batches": rows, "contexts": length}
    size = bytes_per_device(_caches(functions(preset).policy, rows, length))
    check_memory([growing("caches", size, sizes)], make_mesh(MeshConfig()))


def fits(networks: BenchNetworks, rows: int, length: int) -> bool:
    """Return whether a device can hold the weights and caches of `rows` rows of `length` positions."""
    trees = networks.trained, _caches(networks.policy, rows, length)
    return sum(map(bytes_per_device, trees)) <= device_memory(networks.mesh)


def _caches(policy: Policy, rows: int, length: int) -> PyTree:
    return jax.eval_shape(partial(policy.init_cache, rows, length))


def random_networks(preset: Preset) -> BenchNetworks:
    """Return the networks of a preset with random weights.

    Random weights suffice: the cost of a round does not depend on them, and the bench forces the acceptance.
    """
    built, mesh, keys = functions(preset), make_mesh(MeshConfig()), jax.random.split(jax.random.key(0))
    params = Params(
        policy=init_params(built.init_policy, keys[0], mesh), draft=init_params(built.init_draft, keys[1], mesh)
    )
    return BenchNetworks(preset.decoder, built.policy, built.drafter, params, mesh)


def with_block(networks: BenchNetworks, preset: Preset) -> BenchNetworks:
    """Return the same policy with the preset's block draft, of random weights, in place of the EAGLE-3 head."""
    built = block_functions(preset)
    draft = init_params(built.init_draft, jax.random.key(1), networks.mesh)
    return replace(
        networks,
        decoder=preset.block_decoder,
        policy=built.policy,
        drafter=built.drafter,
        trained=replace(networks.trained, draft=draft),
    )


def random_prompts(networks: BenchNetworks, rows: int, length: int) -> Prompts:
    """Return `rows` prompts of random tokens, each of `length` tokens."""
    tokens = np.random.default_rng(0).integers(1, networks.policy.vocab_size, (rows, length), dtype=np.int32)
    return Prompts(jnp.asarray(tokens), jnp.full(rows, length, jnp.int32), jnp.arange(rows, dtype=jnp.int32))
