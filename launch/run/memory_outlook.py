"""Memory that a run is expected to need, beside what there is."""

from launch.plan.memory import checkpoint_copy
from launch.setup.experiment import Experiment
from launch.setup.memory import training_memory
from launch.setup.state import abstract_state
from specjax.parallel.memory import device_memory, host_memory

# Python, jax and compilations beside each other: the peak of the recipe `tiny`, whose arrays are small.
PROCESS_BYTES = 5 * 2**29
# Arrays of the size of these parts that an update on CPUs holds at once, counted for a decoder.
COPIES_ON_CPUS = {"logits of a microbatch": 10, "activations of a microbatch": 33}
MOST_NAMED = 3


def describe_memory(experiment: Experiment) -> str:
    """Return the line about memory: of the process on CPUs, where a process above it is killed, otherwise per device.

    Every process calls this.
    """
    if experiment.mesh.devices.flat[0].platform != "cpu":
        parts, mesh = max(training_memory(experiment), key=lambda at_once: sum(part.size for part in at_once[0]))
        sizes = {part.name: part.size for part in parts}
        return f"memory: at least {_gib(sum(sizes.values()))} of a device's {_gib(device_memory(mesh))}{_named(sizes)}"
    sizes = expected_on_cpus(experiment)
    expected, present = sum(sizes.values()), host_memory()
    line = f"memory: about {_gib(expected)} of this machine's {_gib(present)}{_named(sizes)}"
    if expected > present:
        line += (
            ". WARNING: the system may kill the process; microbatches more, draft.kind = none, lora.rank = 32 or "
            "checkpoint.every = 0 need less"
        )
    return line


def expected_on_cpus(experiment: Experiment) -> dict[str, int]:
    """Return the bytes that a process on CPUs is expected to hold at its peak, an update, by what takes them."""
    sizes, (generating, updating) = {"the process": PROCESS_BYTES}, training_memory(experiment)
    # An asynchronous run generates meanwhile, on other devices of the same memory.
    at_once = [updating] if experiment.rollout_mesh is experiment.mesh else [generating, updating]
    for parts, mesh in at_once:
        for part in parts:
            size = part.size * COPIES_ON_CPUS.get(part.name, 1) * len(mesh.local_devices)
            sizes[part.name] = sizes.get(part.name, 0) + size
    if experiment.config.checkpoint.every:
        # Written in the background, while the next steps run.
        sizes["a checkpoint being saved"] = checkpoint_copy(
            abstract_state(experiment), len(experiment.mesh.local_devices)
        )
    return sizes


def _named(sizes: dict[str, int]) -> str:
    largest = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= 2**30 / 20][:MOST_NAMED]
    return f" ({', '.join(f'{sizes[name] / 2**30:.1f} for {name}' for name in largest)})" if largest else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
