import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import checkpoint_integrity
from specjax.checkpoint import Checkpointer
from specjax.checkpoint_integrity import MANIFEST, DamagedSave, check_manifest, saved_steps, set_damaged_aside
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.state import init_train_state
from specjax.types import Ahead, Params, Prompts, PyTree, Rollout, TrainState
from tests.refusals import refuses

MESH = MeshConfig(data=2, fsdp=2, tensor=2)
DATA, EXTRA = {"position": 7}, {"accuracy": [0.5, None]}


def weights(mesh: MeshConfig, shape: tuple[int, int] = (8, 8)) -> jax.Array:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(values, NamedSharding(make_mesh(mesh), P("fsdp", "tensor")))


def make_state(mesh: MeshConfig = MESH, with_draft: bool = True, with_reference: bool = False) -> TrainState:
    policy = {"layer": {"kernel": weights(mesh)}, "scale": jnp.copy(weights(mesh)[0])}
    params = Params(policy=policy, draft={"kernel": weights(mesh) + 1} if with_draft else {})
    return init_train_state(
        params,
        TrainConfig(draft_training=DraftTrainingConfig(mode="online" if with_draft else "frozen")),
        make_mesh(mesh),
        with_reference,
    )


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def waiting(mesh: MeshConfig, drafts: int) -> Ahead:
    """Return a rollout of two sequences, of which a network drafted so many tokens a round."""
    rows = NamedSharding(make_mesh(mesh), P())
    prompts = Prompts(jnp.ones((1, 3), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32))
    rollout = Rollout(jnp.ones((2, 4), jnp.int32), jnp.ones(2, jnp.int32), drafted=jnp.ones((2, drafts), jnp.int32))
    return jax.device_put(Ahead(prompts, rollout, Params(jnp.int32(1), jnp.int32(1)), None), rows)


def assert_same(found: PyTree, expected: PyTree) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.sharding == y.sharding
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("with_draft, with_reference", [(True, False), (False, True)])
def test_round_trip(tmp_path: Path, with_draft: bool, with_reference: bool):
    """The state may be donated at once. The policy can be restored with any draft."""
    state = make_state(with_draft=with_draft, with_reference=with_reference)
    wipe = jax.jit(lambda state: jax.tree.map(jnp.zeros_like, state), donate_argnums=0)
    with Checkpointer(tmp_path, keep=2) as saves:
        donated = make_state(with_draft=with_draft, with_reference=with_reference)
        saves.save(3, donated, DATA, EXTRA)
        jax.block_until_ready(wipe(donated))
    with Checkpointer(tmp_path) as saves:
        checkpoint = saves.restore(abstract(state))
        params, extra = saves.restore_params(abstract(state).params)
        assert_same(saves.restore_policy(abstract(state).params.policy)[0], state.params.policy)
        with refuses("params.policy."):
            saves.restore_policy(abstract(state).params.policy | {"more": abstract(state).step})
    assert extra == EXTRA
    assert (checkpoint.step, checkpoint.data, checkpoint.extra) == (3, DATA, EXTRA)
    assert_same(checkpoint.state, state)
    assert_same(params, state.params)


def test_rollouts_that_wait_are_restored_though_they_draft_nothing(tmp_path: Path):
    state = replace(make_state(), ahead=(waiting(MESH, drafts=0), waiting(MESH, drafts=2)))
    with Checkpointer(tmp_path, keep=1) as saves:
        saves.save(1, state, DATA, EXTRA)
        assert_same(saves.restore(abstract(state)).state, state)


def test_onto_another_mesh(tmp_path: Path):
    """The state has all optional parts. Values kept per sequence lie on the shards of the new mesh."""

    def full(mesh: MeshConfig) -> TrainState:
        config = TrainConfig(
            rollout=RolloutConfig(group_size=2, max_new_tokens=3, draft_lengths=(0, 2)),
            draft_training=DraftTrainingConfig(replay=2),
        )
        memory = jax.device_put(np.ones((3, 2, 3), np.int32), NamedSharding(make_mesh(mesh), P()))
        params = replace(make_state(mesh).params, memory=memory)
        state = init_train_state(params, config, make_mesh(mesh), True, np.ones((1, 2), np.float32), (4, 5))
        assert state.adaptation is not None

        def numbered(x: jax.Array) -> jax.Array:
            return jax.device_put(np.arange(x.size, dtype=x.dtype).reshape(x.shape), x.sharding)

        rows = jax.tree.map(numbered, state.adaptation.replay)
        return replace(state, adaptation=replace(state.adaptation, replay=rows))

    with Checkpointer(tmp_path, keep=1) as saves:
        saves.save(1, full(MESH), DATA, EXTRA)
        for shape in ((1, 4, 1), (8, 1, 1), (1, 1, 1)):
            other = full(MeshConfig(*shape))
            assert_same(saves.restore(abstract(other)).state, other)


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    with Checkpointer(directory, keep=2, best="reward/mean") as saves:
        for step in (1, 2):
            saves.save(step, make_state(), DATA, EXTRA, 0.5)
    return directory


@pytest.mark.parametrize("how", ["deleted", "cut", "emptied", "changed"])
def test_damage_to_any_file_is_detected(two_saves: Path, tmp_path: Path, how: str):
    files = [path.relative_to(two_saves) for path in sorted((two_saves / "2").rglob("*")) if path.is_file()]
    # A restore does not need these two files.
    files = [path for path in files if path.name not in ("commit_success.txt", "_CHECKPOINT_METADATA")]
    assert len(files) > 10
    for number, file in enumerate(files):
        copy, held = shutil.copytree(two_saves, tmp_path / str(number)), (two_saves / file).read_bytes()
        damaged, said = {
            "deleted": (None, "is missing"),
            "cut": (held[:-1], f"{len(held) - 1} bytes...{len(held)}"),
            "emptied": (b"", f"0 bytes...{len(held)}"),
            "changed": (held[:-1] + bytes([held[-1] ^ 1]), "checksum"),
        }[how]
        (copy / file).unlink()
        if damaged is not None:
            (copy / file).write_bytes(damaged)
        name = file.relative_to("2").as_posix()
        with refuses(f"{copy}/2...{name}...{'unreadable' if name == MANIFEST else said}", DamagedSave):
            check_manifest(copy / "2")
        (note,) = set_damaged_aside(copy)
        assert "2.damaged" in note and saved_steps(copy) == [1]
        assert set_damaged_aside(copy) == []
    # The step is saved again, and may be damaged again.
    state = make_state()
    with Checkpointer(copy, keep=2) as saves:
        assert saves.restore(abstract(state)).step == 1
        saves.save(2, state, DATA, EXTRA)
    shutil.rmtree(copy / "2" / "state")
    assert len(set_damaged_aside(copy)) == 1
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2.damaged"]


def test_a_damaged_older_save_is_not_moved(two_saves: Path, tmp_path: Path):
    """It may be partly deleted. It is never the best, and the next process deletes it."""
    copy = shutil.copytree(two_saves, tmp_path / "copy")
    (copy / "1" / "files.json").unlink()
    (copy / "1" / "state" / "_METADATA").unlink()
    assert set_damaged_aside(copy) == []
    with Checkpointer(copy, keep=1, best="reward/mean") as saves:
        assert saves.best_step() == 2
        saves.save(3, make_state(), DATA, EXTRA, 0.25)
    assert saved_steps(copy) == [2, 3]


def test_what_is_not_read_is_not_checked(two_saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Programs that generate do not read moments, and the search for the best save reads only its score."""
    copy, read, checksum = shutil.copytree(two_saves, tmp_path / "copy"), list[Path](), checkpoint_integrity._checksum
    monkeypatch.setattr(checkpoint_integrity, "_checksum", lambda path: read.append(path) or checksum(path))

    def items_read() -> set[str]:
        items = {path.relative_to(copy).parts[1] for path in read}
        read.clear()
        return items

    like = abstract(make_state())
    with Checkpointer(copy) as saves:
        assert saves.best_step() == 2 and items_read() == {"score"}
        saves.restore_policy(like.params.policy)
        assert items_read() == {"params", "extra"}
        saves.restore_params(like.params)
        assert items_read() == {"params", "extra"}
        saves.restore(like)
        assert items_read() == set()
        shutil.rmtree(copy / "2" / "state")
        saves.restore_params(like.params)
        next(path for path in (copy / "2" / "params").rglob("*") if path.is_file()).unlink()
        with refuses(f"{copy}/2...params/", DamagedSave):
            saves.restore_policy(like.params.policy)


def test_if_all_saves_are_damaged_nothing_is_moved(two_saves: Path, tmp_path: Path):
    assert set_damaged_aside(tmp_path / "nowhere") == []
    copy = shutil.copytree(two_saves, tmp_path / "copy")
    for step in ("1", "2"):
        shutil.rmtree(copy / step / "params")
    with refuses(f"{copy}/2...params/...none of 2", DamagedSave):
        set_damaged_aside(copy)
    assert saved_steps(copy) == [1, 2]
    with Checkpointer(copy) as saves:
        with refuses(f"{copy}/2", DamagedSave):
            saves.restore_params(abstract(make_state()).params)


def test_the_newest_are_kept(tmp_path: Path):
    state = make_state()
    with Checkpointer(tmp_path, keep=2) as saves:
        for step in (1, 2, 5):
            saves.save(step, replace(state, step=state.step + step), DATA, EXTRA)
        saves.save(5, state, DATA, EXTRA)
        assert saves.restore(abstract(state)).step == 5
        assert int(saves.restore(abstract(state)).state.step) == 5
        assert int(saves.restore(abstract(state), 2).state.step) == 2
        with refuses(f"{tmp_path}: ...1...2, 5"):
            saves.restore(abstract(state), 1)
        with refuses(f"{tmp_path}: ...best"):
            saves.restore(abstract(state), "best")


def test_the_best_checkpoint_is_never_deleted(tmp_path: Path):
    state = make_state(with_draft=False)
    scores = {1: 0.25, 2: 0.75, 3: None, 4: 0.5, 5: 0.75, 6: 0.5, 7: None}
    kept = {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5], 6: [5, 6], 7: [5, 7]}
    for step, score in scores.items():
        # One process after the other.
        with Checkpointer(tmp_path, keep=1, best="eval/accuracy") as saves:
            saves.save(step, state, DATA, EXTRA, score)
        assert saved_steps(tmp_path) == kept[step]
    with Checkpointer(tmp_path) as saves:
        assert saves.best_step() == 5
    # Scores of different metrics are not comparable.
    with Checkpointer(tmp_path, keep=1, best="reward/mean") as saves:
        assert saves.best_step() is None
        saves.save(8, state, DATA, EXTRA, -3.0)
        assert saves.best_step() == 8
    assert saved_steps(tmp_path) == [8]


def test_other_arrays_are_refused(two_saves: Path, tmp_path: Path):
    with Checkpointer(tmp_path) as saves, refuses(f"{tmp_path}: "):
        saves.restore_params(abstract(make_state()).params)
    state = abstract(make_state())
    wide = replace(state.params, draft={"kernel": abstract(weights(MESH, (8, 16)))})
    half = replace(state.params, policy=jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), state.params.policy))
    with Checkpointer(two_saves) as saves:
        for other, said in (
            (dict(params=wide), "params.draft.kernel...float32[8, 8]...float32[8, 16]"),
            (dict(params=half), "params.policy.layer.kernel...float32[8, 8]...bfloat16[8, 8]"),
            (dict(reference=state.params.policy), "reference.layer.kernel"),
        ):
            with refuses(f"{two_saves}/2: {said}"):
                saves.restore(replace(state, **other))


KILLED = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from specjax.checkpoint import Checkpointer
from specjax.types import Params, TrainState

def state(step):
    policy = {str(i): jnp.full((4, 1024, 1024), float(step)) for i in range(8)}
    return TrainState(jnp.int32(step), Params(policy, {}), Params({}, {}), None)

saves = Checkpointer(Path(sys.argv[1]), keep=2)
saves.save(1, state(1), {}, {})
saves.save(2, state(2), {}, {})
while not any(path.name.startswith("2") for path in Path(sys.argv[1]).iterdir()):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_save_leaves_the_previous_one(tmp_path: Path):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    everything = {path.name for path in tmp_path.iterdir()}
    with Checkpointer(tmp_path) as saves:
        step = max(saved_steps(tmp_path))
        # The kill comes while 128 MB are being written. If it came later, the save of step 2 would be complete.
        assert step == 2 or any(name.startswith("2.") for name in everything)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        policy = {str(i): jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32, sharding=one) for i in range(8)}
        for value in saves.restore_params(Params(policy, {}))[0].policy.values():
            assert (np.asarray(value) == step).all()
    with Checkpointer(tmp_path, keep=2) as saves:
        saves.save(3, make_state(), DATA, EXTRA)
    assert not any(path.name.startswith("2.") for path in tmp_path.iterdir())
