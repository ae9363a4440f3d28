"""Program that each process of the job in test_processes.py runs: `process_worker.py OUT --hosts..`."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.phases.signals import StopSignals
from models.checkpoints.orbax import restore_params, write_checkpoint
from models.files import new_directory
from specjax.asynchronous.program_timer import ProgramTimer
from specjax.asynchronous.step import AsynchronousStep
from specjax.asynchronous.weight_transfer import Send
from specjax.checkpoint import Checkpointer
from specjax.parallel import processes
from specjax.parallel.mesh import AXES, BATCH_AXES, MeshConfig, disjoint_mesh, make_mesh
from specjax.rewards import HostReward, host_reward
from specjax.rollout.generate import place
from specjax.train.selection import SelectionConfig
from specjax.train.stages import Stages
from specjax.train.train_step import make_train_step
from specjax.types import Prompts, PyTree, TrainState
from tests.specjax.training import CONFIG, make_prompts, mesh_of, networks, state_on

# So that the small rollouts of a test pass as large ones do.
processes._LARGE_BYTES = 1000
STEPS = 2
# The update that begins after the rollout for the next one has ended.
HELD = 2


def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens 5 in each completion; correct if there is one."""
    value = (tokens == 5).sum(axis=1).astype(np.float32)
    return value, (value > 0).astype(np.float32)


def train() -> tuple[dict[str, Any], PyTree, list[list[int]]]:
    """Take steps on a mesh of data 2 and tensor 2. Return their results, the state, and the ids that were scored."""
    mesh, asked = mesh_of(2, 1, 2), list[list[int]]()
    print("mesh made", flush=True)

    def ask(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(ids.tolist())
        return score(tokens, lengths, ids)

    policy, drafter = networks()
    step = make_train_step(policy, drafter, HostReward(ask), CONFIG, mesh)
    state, tokens, metrics = state_on(mesh), [], []
    for _ in range(STEPS):
        state, rollout, measured = step(state, make_prompts())
        tokens.append(processes.fetch((rollout.tokens, rollout.lengths)))
        metrics.append(processes.fetch(measured))
    with jax.set_mesh(mesh):
        reward = processes.fetch(jax.jit(host_reward(ask, mesh))(rollout, place(make_prompts(), mesh)))
    print("trained", flush=True)
    made = {"tokens": tokens, "metrics": metrics, "params": processes.fetch(state.params), "reward": reward}
    return made, state, asked


class Events:
    """When rollouts and updates ended, by a clock that all processes of a machine share, and who was awaited.

    ends: for each kind, in their order, in the process that has their devices. In others they end at once.
    held: numbers of the updates for which the primary did not score the rollout until the next rollout had ended.
    """

    def __init__(self, rollout_mesh: Mesh) -> None:
        self._futures = {name: list[Any]() for name in ("rollouts", "updates")}
        self._timers = {name: ProgramTimer() for name in self._futures}
        self._generates = processes.owners(rollout_mesh) == [processes.index()]
        self.held = list[int]()

    def note(self, name: str, made: jax.Array) -> None:
        each = self._futures[name]
        each.append(self._timers[name].time(time.perf_counter(), None, made))
        if name == "rollouts" and self._generates:
            ended = str(len(each))
            each[-1].add_done_callback(lambda _: processes.tell("ended", ended))

    def score(self, tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = len(self._futures["updates"]) + 1
        if number == HELD and processes.count() > 1 and processes.primary():
            deadline = time.monotonic() + 60
            while str(HELD + 1) not in processes.read_messages("ended") and time.monotonic() < deadline:
                time.sleep(0.01)
            self.held += [number] * (time.monotonic() < deadline)
        return score(tokens, lengths, ids)

    @property
    def ends(self) -> dict[str, list[float]]:
        return {name: [span.result().end for span in each] for name, each in self._futures.items()}


def ahead(out: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take steps of lag 1 on a training mesh and a rollout mesh of one device each, of two processes if there are two.

    Return what they made, and when. out: directory for a checkpoint.
    """
    mesh, rollout_mesh = (device_mesh(number) for number in (0, 2))
    # Rollouts that take longer than updates.
    rollout = replace(CONFIG.rollout, verifier="coupled", max_new_tokens=200, stop_tokens=(), draft_length=1)
    config, events = replace(CONFIG, rollout=rollout, selection=SelectionConfig(groups=1)), Events(rollout_mesh)
    step = AsynchronousStep(Stages(*networks(), HostReward(events.score), config, mesh), rollout_mesh)
    state, rollouts, batches = state_on(mesh, config), [], [make_prompts()] * (HELD + 2)
    state = step.begin(state, batches[0])
    events.note("rollouts", state.ahead[0].rollout.lengths)
    begin = step.begin

    def begin_noted(state: TrainState, prompts: Prompts) -> TrainState:
        state = begin(state, prompts)
        events.note("rollouts", state.ahead[-1].rollout.lengths)
        return state

    step.begin = begin_noted
    for prompts in batches[1:]:
        state, rollout, metrics = step(state, prompts)
        events.note("updates", metrics["loss/policy"])
        rollouts.append(rollout.tokens)
    made = {"tokens": rollouts, "params": state.params, "lag": metrics["asynchronous/lag"]}
    found = {"ends": events.ends, "held": events.held}
    if out is not None:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        with Checkpointer(out / "ahead", keep=1, mesh=mesh) as saves:
            saves.save(HELD + 1, state, {"position": 5}, {})
            restored = saves.restore(abstract)
        pair = processes.fetch((restored.state, state))
        found["saved"] = [restored.data, jax.tree.all(jax.tree.map(np.array_equal, *pair))]
        found["saved"].append(len(jax.tree.leaves(restored.state.ahead)))
    return processes.fetch(made), found


def device_mesh(*numbers: int) -> Mesh:
    """Return a mesh of these devices along `data`."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array([devices[n] for n in numbers]).reshape(-1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)


def send() -> list[np.ndarray]:
    """Return arrays that were sent from two devices of one process, and from one of them, to the two of another."""
    target = device_mesh(2, 3)
    arrays, found = (np.arange(8, dtype=np.float32).reshape(2, 4), np.arange(3, dtype=np.int8)), []
    for source in (device_mesh(0, 1), device_mesh(0)):
        placed = [processes.place(x, NamedSharding(source, P())) for x in arrays]
        sent = Send(lambda x, y: (2 * x, y), (NamedSharding(target, P()),) * 2, source, target)
        found += processes.fetch(sent(*placed))
    return found


def alone() -> list[Any]:
    """Return what a process finds that works alone."""
    return [processes.count(), processes.index(), processes.primary(), processes.gather("own"), processes.agree("own")]


def talk() -> dict[str, Any]:
    """Return values that all processes must agree on."""
    index = processes.index()

    def refuse() -> None:
        raise ValueError("not here")

    try:
        error = processes.on_primary(refuse)
    except ValueError as raised:
        error = str(raised)
    refused = list[str]()
    for make in (lambda: mesh_of(2, 1, 1), lambda: disjoint_mesh(MeshConfig(), make_mesh(MeshConfig(), alone=False))):
        try:
            refused.append(str(make()))
        except ValueError as raised:
            refused.append(str(raised))
    said = list[str]()
    with StopSignals(said.append) as signals:
        before = signals.received
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not said:
                time.sleep(0.01)
        processes.gather(None)
        after = signals.received
    mesh = mesh_of(2, 1, 2)
    placed = processes.place(np.arange(8, dtype=np.int32), NamedSharding(mesh, P(BATCH_AXES)))
    rows, values = processes.own_rows(placed)
    return {
        "agreed": processes.agree(("from", index)),
        "gathered": processes.gather(index),
        "on_primary": processes.on_primary(lambda: index),
        "within": [processes.within(device_mesh(2 * each), lambda: [*alone(), index]) for each in range(2)],
        "elsewhere": processes.within(device_mesh(0), lambda: "here", elsewhere="elsewhere"),
        "error": error,
        "refused": refused,
        "signals": [before, after],
        "fetched": processes.fetch({"x": placed, "y": jnp.sum(placed), "z": 1.5}),
        "owned": rows,
        "joined": processes.join_rows(rows, [2 * values], total=8)[0],
    }


def save(directory: Path, state: PyTree) -> list[bool]:
    """Save the state as a checkpoint, restore it and the policy alone. Return True if both are bit-identical."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(directory / "checkpoints", keep=2, best="reward/mean") as saves:
        saves.save(1, state, {"position": 1}, {}, score=0.5)
        saves.save(2, state, {"position": 2}, {}, score=0.25)
        restored = saves.restore(abstract)
    with new_directory(directory / "policy") as made:
        write_checkpoint(made, {}, state.params.policy)
    policy = restore_params(directory / "policy", abstract.params.policy)
    pairs = (state, restored.state), (state.params.policy, policy)
    return [bool(jax.tree.all(jax.tree.map(np.array_equal, *processes.fetch(pair)))) for pair in pairs]


def main(out: str, coordinator: str, count: str, index: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(coordinator, int(count), int(index), heartbeat_timeout_seconds=20)
    made, state, asked = train()
    found = {"asked": asked, "talk": talk(), "saved": save(Path(out), state), "sent": send()}
    made["ahead"], found["ahead"] = ahead(Path(out))
    if processes.primary():
        np.savez(Path(out) / "made.npz", *jax.tree.leaves(made))
    Path(out, f"process_{index}.json").write_text(json.dumps(found, default=np.ndarray.tolist))
    processes.gather(None)


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[3::2])
