"""Program that each process of the job in test_processes.py runs: `process_worker.py OUT --hosts..`."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.cli.signals import StopSignals
from models.checkpoints.policy import restore_params, write_checkpoint
from models.files import new_directory
from specjax.checkpoint import Checkpointer
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES
from specjax.rewards import HostReward, host_reward
from specjax.rollout.generate import place
from specjax.train.train_step import make_train_step
from specjax.types import PyTree
from tests.specjax.training import CONFIG, make_prompts, mesh_of, networks, state_on

STEPS = 2


def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens 5 in each completion; correct if there is one."""
    value = (tokens == 5).sum(axis=1).astype(np.float32)
    return value, (value > 0).astype(np.float32)


def train() -> tuple[dict[str, Any], PyTree, list[list[int]]]:
    """Take steps on a mesh of data 2 and tensor 2. Return their results, the state, and the ids that were scored."""
    mesh, asked = mesh_of(2, 1, 2), list[list[int]]()

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
    made = {"tokens": tokens, "metrics": metrics, "params": processes.fetch(state.params), "reward": reward}
    return made, state, asked


def talk() -> dict[str, Any]:
    """Return values that all processes must agree on."""
    index = processes.index()

    def refuse() -> None:
        raise ValueError("not here")

    try:
        error = processes.on_primary(refuse)
    except ValueError as raised:
        error = str(raised)
    try:
        refused = str(mesh_of(2, 1, 1))
    except ValueError as raised:
        refused = str(raised)
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
    found = {"asked": asked, "talk": talk(), "saved": save(Path(out), state)}
    if processes.primary():
        np.savez(Path(out) / "made.npz", *jax.tree.leaves(made))
    Path(out, f"process_{index}.json").write_text(json.dumps(found, default=np.ndarray.tolist))
    processes.gather(None)


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[3::2])
