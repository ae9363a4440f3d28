"""Seconds of a round by the cost model: what the hardware sheet allows, before a GPU has run the program."""

from typing import NamedTuple

from jax.sharding import Mesh

from launch.setup.experiment import Experiment
from models.sheets import decoder_sheet
from specjax.cost import Deployment, Hardware, cost_model


class RoundTimes(NamedTuple):
    """Seconds of a round of a phase, by draft length. slots: rows of one data shard."""

    slots: int
    window: int
    seconds: dict[int, float]


def round_times(experiment: Experiment, hardware: Hardware) -> list[RoundTimes]:
    """Return the seconds of a round of each phase, at draft length 0 and at the run's draft lengths."""
    config, networks = experiment.config, experiment.networks
    assert networks.decoder is not None
    deployment = deployment_on(experiment.rollout_mesh, experiment)
    model = cost_model(decoder_sheet(networks.decoder), networks.draft.sheet, hardware, deployment)
    lengths = sorted({0, *config.rollout.lengths})
    return [
        RoundTimes(slots, window, {k: float(model.seconds(slots, slots * window, k)) for k in lengths})
        for slots, window in experiment.phases
    ]


def deployment_on(mesh: Mesh, experiment: Experiment) -> Deployment:
    """Return how the networks of a rollout are spread over a mesh and stored."""
    config, stored = experiment.config, experiment.networks.policy.dtype.itemsize
    return Deployment(
        tensor=mesh.shape["tensor"],
        expert=mesh.shape["expert"] * mesh.shape["tensor"],
        same_rows=True,
        weight_bytes=1 if config.model.rollout_dtype or config.lora.base_dtype else stored,
        cache_bytes=stored,
        factor_bytes=stored,
        draft_bytes=1 if config.draft.rollout_dtype else stored,
    )
