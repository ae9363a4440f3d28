"""Plan of a run: compile its step from shapes, print what it needs, and try other options if it does not fit."""

from dataclasses import replace
from typing import get_args

from configs.schema import RunConfig
from launch.build.experiment import abstract_experiment
from launch.cli.console import console
from launch.cli.errors import ConfigError, RunStopped
from launch.cli.paths import write_results
from launch.plan.alternatives import alternatives
from launch.plan.devices import planned
from launch.plan.options import PlanArgs, PlanConfig
from launch.plan.programs import Planned, ProgramName, plan_program
from launch.plan.report import (
    USABLE,
    Alternative,
    as_json,
    describe,
    gib,
    memory_table,
    round_table,
    traffic_table,
    work,
)
from launch.plan.rounds import round_times
from launch.timing import provenance
from specjax.cost import HARDWARE


def plan(config: RunConfig, args: PlanArgs) -> None:
    """Compile the step for devices that may be absent, print what it needs, and write the same to `--json`.

    Raises ConfigError if the run cannot be planned.
    """
    config, mesh = planned(config, args.plan)
    if config.asynchronous.lag is not None:
        raise ConfigError(f"asynchronous.lag = {config.asynchronous.lag}: must be None, no asynchronous run is planned")
    experiment = abstract_experiment(config, mesh)
    console.print(describe(config, args.plan, mesh))
    placed = replace(args.plan, gpus=None)
    programs: dict[ProgramName, Planned] = {name: plan_program(config, placed, name) for name in get_args(ProgramName)}
    capacity = None if args.plan.gpu == "cpu" else HARDWARE[args.plan.gpu].memory
    times = [] if args.plan.gpu == "cpu" else round_times(experiment, HARDWARE[args.plan.gpu])
    tables = *memory_table(programs, capacity), "", *traffic_table(programs), "", *work(programs, mesh)
    console.print("\n".join((*tables, "", *round_table(times)) if times else tables))
    tried: list[Alternative] = []
    if capacity is not None:
        for name, each in programs.items():
            if each.total <= USABLE * capacity:
                continue
            console.print(f"{name} does not fit" + "; compiled with one option changed:" * args.plan.alternatives)
            if args.plan.alternatives:
                experts = experiment.networks.policy.mixture is not None
                tried += compare(config, placed, name, each.total, experts)
    write_results(args.json, provenance("launch.plan") | as_json(config, args.plan, programs, times, tried))


def compare(config: RunConfig, plan: PlanConfig, program: ProgramName, now: int, experts: bool) -> list[Alternative]:
    """Compile `program` with one option changed at a time (`alternatives`), and print the memory of each variant.

    now: bytes per device without a change.
    """
    found = []
    for change, other in alternatives(config, program, experts):
        try:
            total = plan_program(other, plan, program).total
            found.append(Alternative(program, change, total))
            console.print(f"  {gib(total):>8} GiB, {gib(total - now)}: {change}")
        except (ConfigError, RunStopped) as error:
            found.append(Alternative(program, change, None, str(error)))
            console.print(f"  refused: {change}: {error}")
    if sizes := {each.change: each.total for each in found if each.total is not None}:
        console.print(f"  least memory: {min(sizes, key=lambda change: sizes[change])}")
    return found
