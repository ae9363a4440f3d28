"""Construction of lookup drafters (n-gram and history), alone or combined with a draft."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import LookupConfig
from specjax.drafters import Drafter, EitherDrafter, HistoryDrafter, NGramDrafter
from specjax.parallel import processes
from specjax.parallel.memory import bytes_per_device, check_memory, growing
from specjax.rollout.plan import RolloutConfig
from specjax.types import Policy, PyTree


def with_lookup(drafter: Drafter, lookup: LookupConfig, policy: Policy, rollout: RolloutConfig) -> Drafter:
    """Return the drafter combined with the lookup, or only one of them if the other is configured as none."""
    if lookup.kind == "none":
        return drafter
    ngram = policy.vocab_size, lookup.min_n, lookup.max_n
    if lookup.kind == "ngram":
        lookup_drafter = NGramDrafter(*ngram)
    else:
        lookup_drafter = HistoryDrafter(*ngram, lookup.kept, rollout.group_size, lookup.factor, lookup.offset)
    return EitherDrafter(lookup_drafter, drafter) if drafter.proposes else lookup_drafter


def abstract_memory(drafter: Drafter, prompts: int, rollout: RolloutConfig, mesh: Mesh) -> PyTree:
    """Return the drafter's memory as ShapeDtypeStructs, replicated over the mesh; () if it has none.

    prompts: number of distinct prompts, each with its own place in the memory.
    """
    memory = drafter.memory
    if memory is None or not prompts:
        return ()
    shapes = jax.eval_shape(lambda: memory.blank(prompts, rollout.max_new_tokens))
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, P())), shapes)


def blank_memory(drafter: Drafter, prompts: int, kept: int, rollout: RolloutConfig, mesh: Mesh) -> PyTree:
    """Return the drafter's empty memory, replicated over the mesh; () if it has none.

    Raises ValueError if the devices cannot hold it.

    prompts: number of distinct prompts.
    kept:    number of completions kept per prompt.
    """
    shapes, memory = abstract_memory(drafter, prompts, rollout, mesh), drafter.memory
    if memory is None or not prompts:
        return ()
    options = {"draft.lookup.kept": kept, "rollout.max_new_tokens": rollout.max_new_tokens}
    check_memory([growing("the memory of the history lookup", bytes_per_device(shapes), options)], mesh)
    return processes.place(memory.blank(prompts, rollout.max_new_tokens), NamedSharding(mesh, P()))
