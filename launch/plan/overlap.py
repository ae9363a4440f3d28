"""Estimate of an asynchronous step beside a synchronous one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from configs.schema import AsynchronousConfig
from launch.plan.devices import hardware_of
from launch.plan.estimate import MeshEstimate, estimate
from launch.plan.meshes import with_mesh
from launch.plan.options import PlanConfig
from launch.predict.clock import ACCEPTANCE
from launch.setup.experiment import Experiment, abstract_experiment


def estimate_overlap(experiment: Experiment, plan: PlanConfig) -> tuple[MeshEstimate, MeshEstimate]:
    """Return the estimates of an asynchronous step, and of a synchronous one on the devices that train.

    Raises ConfigError if the run cannot be synchronous.
    """
    config, mesh = experiment.config, experiment.mesh
    hardware = hardware_of(plan, mesh.size + experiment.rollout_mesh.size)
    # Slots are those of a shard that generates.
    generating = replace(config, mesh=config.asynchronous.rollout_mesh, asynchronous=AsynchronousConfig())
    synchronous = abstract_experiment(with_mesh(generating, config.mesh), mesh)
    return estimate(experiment, hardware), estimate(synchronous, hardware)


def overlap_table(ahead: MeshEstimate, synchronous: MeshEstimate, usable: float) -> Iterator[str]:
    """Yield the lines of the seconds of both steps. usable: bytes of a device, to say what does not fit."""
    titles = "GPUs", "weights, s", "rounds, s", "update, s", "step, s", "GPUs x s"
    yield f"{'steps, estimated':20}" + "".join(f"{title:>13}" for title in titles)
    for name, row in (f"lag {ahead.config.asynchronous.lag}", ahead), ("synchronous", synchronous):
        seconds = row.weights, row.drafted, row.update, row.seconds, row.gpus * row.seconds
        too_large = "  too large" if row.largest > usable else ""
        yield f"  {name:18}{row.gpus:>13}" + "".join(f"{value:>13,.2f}" for value in seconds) + too_large
    longer = "rollout" if ahead.drafted > ahead.update else "training"
    if ahead.config.asynchronous.lag:
        yield f"  The {longer} mesh is busy for longer, by {abs(ahead.drafted - ahead.update):,.2f} s a step."
    yield "  By the hardware sheet, not measured. Weights: sent and gathered before the rounds. All completions have"
    yield f"  max_new_tokens; a token is accepted with {ACCEPTANCE} where those before it are. Draft training and"
    yield "  rewards are left out."


def overlap_json(ahead: MeshEstimate, synchronous: MeshEstimate) -> dict[str, Any]:
    """Return both steps as JSON: sizes in bytes, times in seconds."""
    config, rows = ahead.config.asynchronous, {"lag": ahead, "synchronous": synchronous}
    steps = {name: {"gpus": row.gpus, **row.figures} for name, row in rows.items()}
    return {"lag": config.lag, "rollout_mesh": vars(config.rollout_mesh), "steps": steps}
