"""Report of a plan, as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.plan.estimate import MeshEstimate
from launch.plan.options import PlanConfig
from launch.plan.programs import Planned, PlannedName
from launch.plan.traffic import Traffic
from launch.predict.clock import RoundTimes
from launch.predict.memory import USABLE, ProgramName
from specjax.cost import HARDWARE
from specjax.parallel.memory import gib

# Fraction that JAX reserves by default (XLA_PYTHON_CLIENT_MEM_FRACTION).
BY_DEFAULT = 0.75
# Section of the mesh that runs each program of an asynchronous run.
SECTIONS: dict[ProgramName, str] = {"update": "mesh", "generate": "asynchronous.rollout_mesh"}


@dataclass(frozen=True)
class Alternative:
    """Memory of a program that was compiled with one option changed.

    Attributes:
        program: `generate` or `update`.
        change:  the changed option and its value.
        total:   bytes per device; None if the options contradict each other.
        refused: the error in that case.
    """

    program: str
    change: str
    total: int | None
    refused: str | None = None


def describe(config: RunConfig, plan: PlanConfig, mesh: Mesh, rollout_mesh: Mesh) -> str:
    """Return one line that names the recipe and the devices."""
    device = "CPU devices" if plan.gpu == "cpu" else HARDWARE[plan.gpu].name
    devices = _describe_devices(mesh, device)
    if rollout_mesh is not mesh:
        devices = f"{devices} that train and {_describe_devices(rollout_mesh, device)} that generate"
    if plan.gpu == "cpu":
        return (
            f"{config.name} on {devices}. NOT A GPU'S FIGURES: temporaries are 2.5 to 3 times a GPU's, and collectives "
            "differ"
        )
    return f"{config.name} on {devices}, compiled without one, kernels not autotuned"


def _describe_devices(mesh: Mesh, device: str) -> str:
    return f"{mesh.size} {device} ({', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())})"


def memory_table(
    programs: Mapping[PlannedName, Planned], capacity: int | None, separate: bool = False
) -> Iterator[str]:
    """Yield the lines of memory per device by component, and whether it fits.

    capacity: bytes of a device; None: unknown. separate: each program has a mesh of its own.
    """
    yield f"{'memory per device, GiB':34}" + "".join(f"{name:>10}" for name in programs)
    for part in dict.fromkeys(part for each in programs.values() for part in each.memory):
        sizes = [each.memory.get(part) for each in programs.values()]
        if any(sizes):
            yield f"  {part:32}" + "".join(f"{'' if size is None else gib(size):>10}" for size in sizes)
    yield f"  {'total':32}" + "".join(f"{gib(each.total):>10}" for each in programs.values())
    if capacity is None:
        return
    yield f"  {'of the device':32}" + "".join(f"{each.total / capacity:>10.0%}" for each in programs.values())
    if separate:
        for name, section in SECTIONS.items():
            yield f"{section}: {_verdict(programs[name].total, capacity)}"
    else:
        yield _verdict(max(each.total for each in programs.values()), capacity)


def host_line(size: int, devices: int) -> str:
    """Return the line of host memory. size: bytes of a host with so many devices."""
    return (
        f"host memory: {gib(size)} GiB on a host of {devices} devices while a checkpoint is written, a copy of the "
        "training state; Python, data and the compiler need more"
    )


def _verdict(largest: int, capacity: int) -> str:
    """Return whether a program of so many bytes fits."""
    if largest > USABLE * capacity:
        usable = f"{gib(USABLE * capacity)} of a device's {gib(capacity)} GiB are usable"
        return f"does not fit: {gib(largest)} GiB are needed, {usable}"
    if largest > BY_DEFAULT * capacity:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}; by default JAX takes {BY_DEFAULT:.0%} of a device"
    return "fits"


def traffic_table(programs: Mapping[PlannedName, Planned]) -> Iterator[str]:
    """Yield the lines of collectives: of each program, and of one admission, round at the longest draft, or answer."""
    yield f"{'collectives':34}{'between':>24}{'times':>8}{'MB received':>14}"
    for title, traffic in _parts(programs):
        if not traffic.count and title != "one admission":
            yield f"  {title}: none"
        for kind, count in traffic.count.items():
            between = ", ".join(kind.axes) or "one device"
            yield f"  {f'{title}: {kind.operation}':32}{between:>24}{count:>8,}{traffic.size[kind] / 1e6:>14,.1f}"


def work(programs: Mapping[PlannedName, Planned], mesh: Mesh, rollout_mesh: Mesh) -> Iterator[str]:
    """Yield the lines of matrix products and compile times."""
    rounds = programs["decode" if "decode" in programs else "generate"]
    turn, update = rounds.flops.turn / rollout_mesh.size, programs["update"].flops.fixed / mesh.size
    products = [f"{turn / 1e12:,.2f} TFLOP a round"]
    if "answer" in programs:
        products.append(f"{programs['answer'].flops.fixed / rollout_mesh.size / 1e12:,.2f} an answer to all rows")
    products.append(f"{update / 1e12:,.1f} an update")
    yield f"matrix products, divided by the devices: {', '.join(products)}"
    yield "traced and compiled in " + ", ".join(f"{each.seconds:.0f} s ({name})" for name, each in programs.items())


def round_table(times: Sequence[RoundTimes]) -> Iterator[str]:
    """Yield the lines of the seconds of a round by phase and draft length."""
    lengths = times[0].seconds
    yield f"{'a round by the hardware sheet, ms':34}" + "".join(f"{f'draft {k}':>10}" for k in lengths)
    for slots, window, seconds in times:
        yield f"  {f'{slots} rows of {window} positions':32}" + "".join(f"{1e3 * seconds[k]:>10.2f}" for k in lengths)


def as_json(
    config: RunConfig,
    plan: PlanConfig,
    programs: Mapping[PlannedName, Planned],
    times: Sequence[RoundTimes],
    tried: Sequence[Alternative],
    estimates: Sequence[MeshEstimate],
    checkpoint_copy: int,
) -> dict[str, Any]:
    """Return the plan as JSON: sizes in bytes, times in seconds."""
    return {
        "recipe": config.name,
        "gpu": plan.gpu,
        "mesh": vars(config.mesh),
        "memory_of_a_device": None if plan.gpu == "cpu" else HARDWARE[plan.gpu].memory,
        "host_memory": checkpoint_copy,
        "programs": {
            name: {
                "memory": each.memory,
                "flops": each.flops._asdict(),
                "compile_s": each.seconds,
                "compiler_options": each.options,
            }
            for name, each in programs.items()
        },
        "collectives": {
            title: [
                {"operation": kind.operation, "axes": kind.axes, "times": count, "bytes": traffic.size[kind]}
                for kind, count in traffic.count.items()
            ]
            for title, traffic in _parts(programs)
        },
        "rounds": [each._asdict() for each in times],
        "alternatives": [vars(each) for each in tried],
        "meshes": [
            {"mesh": vars(each.config.mesh), "microbatches": each.config.microbatches, **each.figures}
            for each in estimates
        ],
    }


def _parts(programs: Mapping[PlannedName, Planned]) -> Iterator[tuple[str, Traffic]]:
    if "generate" in programs:
        yield "generate", programs["generate"].collectives.fixed
        yield "one admission", programs["generate"].collectives.outer
        yield "one round", programs["generate"].collectives.turn
    else:
        yield "begin", programs["begin"].collectives.fixed
        yield "decode", programs["decode"].collectives.fixed
        yield "one round", programs["decode"].collectives.turn
        yield "one answer", programs["answer"].collectives.fixed
        yield "finish", programs["finish"].collectives.fixed
    yield "update", programs["update"].collectives.fixed
