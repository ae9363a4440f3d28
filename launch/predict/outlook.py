"""Memory that a run is expected to need, beside what there is."""

from launch.predict.memory import PROGRAMS, checkpoint_copy, needed, program_mesh
from launch.setup.experiment import Experiment
from launch.setup.state import abstract_state
from specjax.parallel.memory import device_memory, gib, host_memory

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
        state = abstract_state(experiment)
        programs = ((needed(name, experiment, state), program_mesh(name, experiment)) for name in PROGRAMS)
        sizes, mesh = max(programs, key=lambda program: sum(program[0].values()))
        least, present = gib(sum(sizes.values())), gib(device_memory(mesh))
        return f"memory: at least {least} GiB of a device's {present} GiB{_named(sizes)}"
    sizes = expected_on_cpus(experiment)
    expected, present = sum(sizes.values()), host_memory()
    line = f"memory: about {gib(expected)} GiB of this machine's {gib(present)} GiB{_named(sizes)}"
    if expected > present:
        line += (
            ". WARNING: the system may kill the process; microbatches more, draft.kind = none, lora.rank = 32 or "
            "checkpoint.every = 0 need less"
        )
    return line


def expected_on_cpus(experiment: Experiment) -> dict[str, int]:
    """Return the bytes that a process on CPUs is expected to hold at its peak, an update, by what takes them."""
    sizes, state = {"the process": PROCESS_BYTES}, abstract_state(experiment)
    # An asynchronous run generates meanwhile, on other devices of the same memory.
    for name in ("update",) if experiment.rollout_mesh is experiment.mesh else PROGRAMS:
        local = len(program_mesh(name, experiment).local_devices)
        for part, size in needed(name, experiment, state).items():
            sizes[part] = sizes.get(part, 0) + size * COPIES_ON_CPUS.get(part, 1) * local
    if experiment.config.checkpoint.every:
        # Written in the background, while the next steps run.
        sizes["a checkpoint being saved"] = checkpoint_copy(state, len(experiment.mesh.local_devices))
    return sizes


def _named(sizes: dict[str, int]) -> str:
    largest = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= 2**30 / 20][:MOST_NAMED]
    return f" ({', '.join(f'{gib(sizes[name])} for {name}' for name in largest)})" if largest else ""
