"""Number of microbatches that a batch allows."""

from dataclasses import replace

from configs.schema import RunConfig


def with_fitting_microbatches(config: RunConfig) -> RunConfig:
    """Return the config with the fewest microbatches, at least its own, that divide the sequences of a data shard.

    So none has more rows than before. Fewer sequences than microbatches get one each. With data.prompts,
    selection.groups or minibatches that do not divide either, and are therefore refused: with one microbatch.
    """
    groups, updates = config.trained_groups(config.data.prompts), config.updates
    shards = config.mesh.data * config.mesh.fsdp
    sequences, rest = divmod(groups // shards * config.rollout.group_size, updates.minibatches)
    if groups % shards or config.data.prompts % shards or rest or not sequences:
        return replace(config, microbatches=1)
    microbatches = min(config.microbatches, sequences)
    while sequences % microbatches:
        microbatches += 1
    return replace(config, microbatches=microbatches)
