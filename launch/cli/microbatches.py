"""Number of microbatches that a batch allows."""

from dataclasses import replace

from configs.schema import RunConfig


def with_fitting_microbatches(config: RunConfig) -> RunConfig:
    """Return the config with the fewest microbatches, at least its own, that divide the sequences of a data shard.

    Then none has more rows than before, unless a shard has fewer sequences than the config has microbatches. With data.prompts, selection.groups or minibatches that do not divide either, and are therefore refused: with one.
    """
    groups, updates = config.selection.groups or config.data.prompts, config.updates
    parts = config.mesh.data * config.mesh.fsdp * updates.minibatches
    sequences, rest = divmod(groups * config.rollout.group_size, parts)
    if rest or not sequences:
        return replace(config, microbatches=1)
    microbatches = min(config.microbatches, sequences)
    while sequences % microbatches:
        microbatches += 1
    return replace(config, microbatches=microbatches)
