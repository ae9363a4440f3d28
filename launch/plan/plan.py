"""Plan of a run: compile its step from shapes, print what it needs, and try other options if it does not fit."""

import math
from collections.abc import Sequence
from dataclasses import replace

from configs.schema import RunConfig
from launch.cli.paths import write_results
from launch.console import console
from launch.errors import ConfigError, RunStopped
from launch.plan.alternatives import alternatives
from launch.plan.bound import check_bound, smaller_options
from launch.plan.devices import hardware_of, mesh_over, planned, planned_devices
from launch.plan.estimate import MeshEstimate
from launch.plan.meshes import enough_gpus, mesh_options, mesh_table, rank_meshes
from launch.plan.options import PlanArgs, PlanConfig
from launch.plan.overlap import estimate_overlap, overlap_json, overlap_table
from launch.plan.programs import Planned, PlannedName, half_of, plan_program, program_names
from launch.plan.report import (
    Alternative,
    as_json,
    describe,
    host_line,
    memory_table,
    round_table,
    traffic_table,
    work,
)
from launch.predict.clock import round_times
from launch.predict.memory import PROGRAMS, USABLE, checkpoint_copy
from launch.setup.experiment import Experiment, abstract_experiment
from launch.setup.state import abstract_state
from launch.timing import provenance
from specjax.cost import HARDWARE
from specjax.parallel.memory import gib
from specjax.parallel.mesh import describe_mesh

Programs = dict[PlannedName, Planned]


def plan(config: RunConfig, args: PlanArgs) -> None:
    """Compile the step for devices that may be absent, print what it needs, and write the same to `--json`.

    Raises ConfigError if the run cannot be planned.
    """
    recipe, recipe_plan = config, replace(args.plan, gpus=None, mesh="recipe")
    lag = config.asynchronous.lag
    if lag is not None and args.plan.mesh == "auto":
        raise ConfigError(f"plan.mesh = auto: chooses one mesh; must be recipe with asynchronous.lag = {lag}")
    capacity = None if args.plan.gpu == "cpu" else HARDWARE[args.plan.gpu].memory
    usable = math.inf if capacity is None else USABLE * capacity
    estimates: list[MeshEstimate] = []
    if args.plan.mesh == "auto":
        estimates = _estimates(config, args.plan, usable)
        configs = [each.config for each in estimates if each.largest <= usable]
        experiment, programs = compile_first_fitting(configs, recipe_plan, usable)
    else:
        experiment, programs = _compile(config, args.plan, usable)
    config, meshes = experiment.config, (experiment.mesh, experiment.rollout_mesh)
    times = [] if args.plan.gpu == "cpu" else round_times(experiment, HARDWARE[args.plan.gpu])
    memory = memory_table(programs, capacity, separate=lag is not None)
    host = hardware_of(args.plan, experiment.mesh.size).per_host
    copied = checkpoint_copy(abstract_state(experiment), host)
    tables = [*memory, host_line(copied, host), "", *traffic_table(programs), "", *work(programs, *meshes)]
    console.print("\n".join([*tables, "", *round_table(times)] if times else tables))
    overlap = None if lag is None else estimate_overlap(experiment, args.plan)
    if overlap is not None:
        console.print("\n".join(("", *overlap_table(*overlap, usable))))
    tried: list[Alternative] = []
    for half in PROGRAMS:
        of_half: Programs = {name: program for name, program in programs.items() if half_of(name) == half}
        name, program = max(of_half.items(), key=lambda each: each[1].total)
        if program.total <= usable:
            continue
        console.print(f"{name} does not fit" + "; compiled with one option changed:" * args.plan.alternatives)
        if args.plan.alternatives:
            experts = experiment.networks.policy.mixture is not None
            tried += compare(config, recipe_plan, name, program.total, experts)
    if estimates:
        console.print(f"\nmesh: {mesh_options(config, recipe)}")
    results = as_json(config, args.plan, programs, times, tried, estimates, copied)
    if overlap is not None:
        results["asynchronous"] = overlap_json(*overlap)
    write_results(args.json, provenance("launch.plan") | results)


def _estimates(config: RunConfig, plan: PlanConfig, usable: float) -> list[MeshEstimate]:
    """Rank meshes, print them, and return their estimates. Raises ConfigError if none can fit."""
    estimates, refused = rank_meshes(config, plan, usable)
    console.print("\n".join(mesh_table(estimates, refused, usable)) + "\n")
    best, count = estimates[0], math.prod(estimates[0].config.mesh.shape)
    if best.largest > usable:
        smallest = abstract_experiment(best.config, mesh_over(planned_devices(plan, count), best.config.mesh))
        remedies = smaller_options(smallest, usable) if best.memory["update"] <= usable else []
        enough = enough_gpus(config, plan, count, usable)
        more = f"--plan.gpus {enough}" if enough else "none up to 8 times as many GPUs"
        raise ConfigError(
            f"plan.gpus = {count}: too few for every mesh; {describe_mesh(best.config.mesh)} needs the least, "
            f"{gib(best.largest)} GiB per device without temporaries, of {gib(usable)} that are usable; nearest: "
            + ", or ".join([*remedies, more])
        )
    return estimates


def compile_first_fitting(configs: Sequence[RunConfig], plan: PlanConfig, usable: float) -> tuple[Experiment, Programs]:
    """Compile the configs in turn until one fits. If none fits, return the one that needs the least memory.

    Raises the error of the last one if none can be compiled.
    """
    compiled: list[tuple[int, Experiment, Programs]] = []
    for config in configs:
        try:
            experiment, programs = _compile(config, plan, usable)
        except (ConfigError, RunStopped) as error:
            if config is configs[-1] and not compiled:
                raise
            console.print(f"  {error}")
            continue
        largest = max(each.total for each in programs.values())
        if largest <= usable:
            return experiment, programs
        console.print(f"  does not fit: {gib(largest)} GiB are needed, {gib(usable)} are usable")
        compiled.append((largest, experiment, programs))
    _, experiment, programs = min(compiled, key=lambda each: each[0])
    console.print(f"none of {len(configs)} meshes fits; {describe_mesh(experiment.config.mesh)} needs the least memory")
    return experiment, programs


def _compile(config: RunConfig, plan: PlanConfig, usable: float) -> tuple[Experiment, Programs]:
    """Build the experiment on the plan's devices, print where it runs, and compile its programs.

    Raises ConfigError if it cannot fit.
    """
    config, *meshes = planned(config, plan)
    experiment, recipe_plan = abstract_experiment(config, *meshes), replace(plan, gpus=None)
    console.print(describe(config, plan, *meshes))
    check_bound(experiment, usable)
    return experiment, {name: plan_program(config, recipe_plan, name) for name in program_names(experiment)}


def compare(config: RunConfig, plan: PlanConfig, program: PlannedName, now: int, experts: bool) -> list[Alternative]:
    """Compile `program` with one option changed at a time (`alternatives`), and print the memory of each variant.

    now: bytes per device without a change.
    """
    results = []
    for change, variant in alternatives(config, program, experts):
        try:
            total = plan_program(variant, plan, program).total
            results.append(Alternative(program, change, total))
            console.print(f"  {gib(total):>8} GiB, {gib(total - now)}: {change}")
        except (ConfigError, RunStopped) as error:
            results.append(Alternative(program, change, None, str(error)))
            console.print(f"  refused: {change}: {error}")
    if sizes := {each.change: each.total for each in results if each.total is not None}:
        console.print(f"  least memory: {min(sizes, key=lambda change: sizes[change])}")
    return results
