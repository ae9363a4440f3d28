"""Lookup drafters (n-gram and history) as the configuration asks for them, alone or beside a draft."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema.networks import LookupConfig
from specjax.drafters import Drafter, EitherDrafter, HistoryDrafter, NGramDrafter, NoDrafter
from specjax.rollout.plan import RolloutConfig
from specjax.types import Policy, PyTree


def with_lookup(drafter: Drafter, lookup: LookupConfig, policy: Policy, rollout: RolloutConfig) -> Drafter:
    """Return the drafter combined with the lookup, or the lookup alone if there is no drafter."""
    if lookup.kind == "none":
        return drafter
    lengths = policy.vocab_size, lookup.min_n, lookup.max_n
    if lookup.kind == "ngram":
        looking = NGramDrafter(*lengths)
    else:
        looking = HistoryDrafter(*lengths, lookup.kept, rollout.group_size, lookup.factor, lookup.offset)
    return looking if isinstance(drafter, NoDrafter) else EitherDrafter(looking, drafter)


def blank_memory(drafter: Drafter, prompts: int, rollout: RolloutConfig, mesh: Mesh) -> PyTree:
    """Return the drafter's memory before the first rollout, on every device; () if it has none."""
    if drafter.memory is None or not prompts:
        return ()
    return jax.device_put(drafter.memory.blank(prompts, rollout.max_new_tokens), NamedSharding(mesh, P()))
