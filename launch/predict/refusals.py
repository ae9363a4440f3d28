"""Refusal of a run that the devices cannot hold, before anything is allocated or compiled.

Only what must be in memory at once counts, so that a run that fits is never refused. A compiled program needs more.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from launch.errors import as_config_error
from launch.predict.memory import PROGRAMS, Parts, needed, of_networks, of_rollout, program_mesh
from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from launch.setup.state import abstract_state
from specjax.parallel.memory import MemoryPart, bytes_per_device, check_memory, growing
from specjax.rollout.plan import RolloutConfig


def check_rollout(
    experiment: Experiment, rollout: RolloutConfig, prompts: tuple[int, int], rows: Mapping[str, int]
) -> None:
    """Raise ConfigError if the devices cannot hold a rollout, or if one's own rollout function cannot be traced.

    prompts: number of prompts, and the tokens to which they are padded.
    rows: the options that set the number of sequences, and their values.
    """
    with as_config_error():
        params = experiment.networks.params
        parts = of_networks(params) | {"lookup and replay": bytes_per_device(params.memory)}
        parts |= of_rollout(experiment, rollout, prompts, experiment.mesh)
        _check_parts(experiment, parts, experiment.mesh, rollout, prompts[1], rows)
    if experiment.config.rollout.function is not None:
        trace_rollout(experiment, rollout, prompts[0], experiment.mesh)


def check_training(experiment: Experiment) -> None:
    """Raise ConfigError if the devices cannot hold a training step: its rollout, or one of its updates."""
    config = experiment.config
    rows = {"data.prompts": config.data.prompts, "rollout.group_size": config.rollout.group_size}
    with as_config_error():
        state = abstract_state(experiment)
        for name in PROGRAMS:
            parts, mesh = needed(name, experiment, state), program_mesh(name, experiment)
            _check_parts(experiment, parts, mesh, config.rollout, experiment.prompt_width, rows)


def _check_parts(
    experiment: Experiment, parts: Parts, mesh: Mesh, rollout: RolloutConfig, width: int, rows: Mapping[str, int]
) -> None:
    """Raise ValueError if a device cannot hold these parts at once, with the option that makes the largest smaller.

    width: tokens to which prompts are padded.
    """
    config, longest_draft = experiment.config, max(rollout.lengths)
    lag, replay = config.asynchronous.lag, config.draft_training.replay
    # Options that bound the parts of the longest row.
    widths = {
        "tokens of the longest prompt (data.max_prompt_tokens)": width,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
    }
    # The smallest change first.
    less = " or ".join(f"--{name.replace('_', '-')}" for name in (*rows, "data.max_prompt_tokens"))
    fewer = f"fewer slots in --rollout.phases, or less of {less}"
    options = {
        "caches": ({**rows, **widths}, fewer),
        "logits of a verification": ({"rollout.draft_length": longest_draft, **rows}, fewer),
        "tokens of the rollout": ({**rows, **widths}, ""),
        "rollouts that wait": ({**rows, **widths}, "asynchronous.lag less"),
        "lookup and replay": ({"draft_training.replay": replay, **widths}, "draft.lookup.kept less"),
        "logits of a microbatch": ({**rows, **widths}, "logit_chunk less, or microbatches more"),
        "activations of a microbatch": ({**rows, **widths}, "microbatches more"),
    }
    # All others are as large as the networks.
    axis, section = ("fsdp", "mesh") if mesh is experiment.mesh else ("tensor", "asynchronous.rollout_mesh")
    remedy = "must be more, or the networks smaller"
    if lag and mesh is not experiment.mesh:
        remedy += f", or asynchronous.lag = {lag} less"
    check_memory(
        [
            growing(name, size, *options[name])
            if name in options
            else MemoryPart(name, size, f"{section}.{axis}", mesh.shape[axis], remedy)
            for name, size in parts.items()
        ],
        mesh,
    )
