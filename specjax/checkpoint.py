"""Checkpoints of a run: everything that resume needs, written in the background. Each is complete or absent."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from specjax.checkpoint_integrity import DamagedSave, check_finite, check_manifest, saved_steps, write_manifest
from specjax.options import NonNegative
from specjax.parallel import processes
from specjax.types import Params, PyTree, TrainState
from specjax.writing import writing

T = TypeVar("T")


class Checkpoint(NamedTuple):
    """Contents of a checkpoint: training state, position of the data pipeline, and other JSON data of the run."""

    step: int
    state: TrainState
    data: dict[str, Any]
    extra: dict[str, Any]


# Selects a checkpoint: by step, the newest, or the one with the highest score.
Which = NonNegative | Literal["newest", "best"]


# Empty file in a checkpoint from which, or to which, an update was skipped.
UNHEALTHY = "unhealthy"
# Item of a checkpoint that has a score.
SCORE = "score"


class Score(NamedTuple):
    """Score of a checkpoint: the value of a metric at its step. Higher is better."""

    metric: str
    value: float


class Checkpointer:
    """Reader and writer of the checkpoints in a directory. Leaving the `with` block waits for the last checkpoint.

    Args:
        directory: holds one subdirectory per checkpoint, named by its step.
        keep:      how many of the newest checkpoints to keep. None: read only, which is safe while another process
                   writes.
        best:      metric whose best checkpoint is kept as well. For a reader, None means the last metric used.
        mesh:      devices of the state. Of several processes, those that have one read and write; the primary is one
                   of them. None: all do.
    """

    def __init__(
        self, directory: Path, keep: int | None = None, best: str | None = None, mesh: Mesh | None = None
    ) -> None:
        self._directory, self._best = directory.absolute(), best
        self._mesh, members = mesh, [*range(processes.count())] if mesh is None else processes.owners(mesh)
        self._alone = len(members) == 1 < processes.count()
        self._saving: int | None = None
        several = ocp.options.MultiprocessingOptions()
        if len(members) < processes.count():
            several = ocp.options.MultiprocessingOptions(0, {*members}, "checkpoints")
        options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=several)
        if keep is not None:
            processes.on_primary(lambda: self._directory.mkdir(parents=True, exist_ok=True))
            policies: list[ocp.checkpoint_managers.PreservationPolicy] = [_KeepHealthy(self, keep)]
            if best is not None:
                policies.append(_KeepBest(self))
            # An incomplete checkpoint of a killed process never counts. The next writer deletes it.
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
                create=False,
                multiprocessing_options=several,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
            )
        handlers: dict[str, Any] = {name: ocp.PyTreeCheckpointHandler() for name in ("params", "state")}
        handlers |= {name: ocp.JsonCheckpointHandler() for name in ("data", "extra", SCORE)}
        self._manager: Any = None
        if processes.index() in members:
            self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        steps = self._all_steps()
        self._scores = {step: score for step in steps if (score := self._read_score(step))}
        self._unhealthy = {step for step in steps if (self._directory / str(step) / UNHEALTHY).exists()}

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._manager is not None:
            with self._writing() if kind is None else suppress(Exception):
                self._manager.close()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete. Raises OSError, in one line, if it cannot be written."""

        def wait() -> None:
            with self._writing():
                self._manager.wait_until_finished()

        self._among_members(wait)

    def _among_members(self, run: Callable[[], T]) -> T:
        """Call a function in the processes that read and write. The others get the primary's result, or its error."""
        return run() if self._mesh is None else processes.within(self._mesh, run)

    def _all_steps(self) -> list[int]:
        return self._among_members(lambda: [*self._manager.all_steps()])

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory / str(self._saving), self._last_whole)

    def _last_whole(self) -> str:
        step = max((step for step in saved_steps(self._directory) if step != self._saving), default=None)
        return "there is no whole checkpoint" if step is None else f"the last whole checkpoint is that of step {step}"

    def newest(self) -> int | None:
        """Wait for the save in progress, and return the step of the newest checkpoint, or None without one."""
        self.wait()
        return max(self._all_steps(), default=None)

    def newest_healthy(self) -> int | None:
        """Wait for the save in progress, and return the step of the newest healthy checkpoint, or None without one."""
        self.wait()
        return max(self.healthy(self._all_steps()), default=None)

    def healthy(self, steps: Iterable[int]) -> list[int]:
        """Return those of the steps whose checkpoints are not marked as unhealthy."""
        return [step for step in steps if step not in self._unhealthy]

    def mark_unhealthy(self, step: int) -> None:
        """Mark a checkpoint: it then never takes the place of a healthy one among those that are kept."""
        self.wait()
        if step in self._all_steps():
            self._unhealthy.add(step)
            if processes.primary():
                (self._directory / str(step) / UNHEALTHY).touch()

    def best_step(self) -> int | None:
        """Return the step with the highest score in the metric `best`; None if no checkpoint has a score.

        If scores are equal, the newest wins.
        """
        metric = self._best or next((self._scores[step].metric for step in sorted(self._scores, reverse=True)), None)
        values = {step: score.value for step, score in self._scores.items() if score.metric == metric}
        return max(values, key=lambda step: (values[step], step), default=None)

    def save(
        self,
        step: int,
        state: TrainState,
        data: dict[str, Any],
        extra: dict[str, Any],
        score: float | None = None,
        healthy: bool = True,
    ) -> None:
        """Write a checkpoint in the background. Does nothing if the newest one is already of this step.

        The caller may donate the state as soon as this returns.

        Args:
            data, extra: JSON-serialisable.
            score:       value of the metric `best` at this step; None if it was not measured.

        Raises the error of the previous call, if that failed in the background.
        """
        if step == max(self._all_steps(), default=None):
            return
        items = dict[str, Any](data=ocp.args.JsonSave(data), extra=ocp.args.JsonSave(extra))
        state = replace(state, ahead=_without_empty(processes.fetch(state.ahead)))
        if self._alone and self._manager is not None:
            # Orbax refuses arrays of a single one of several processes.
            state = processes.fetch_here(state)
        items |= {name: ocp.args.PyTreeSave(arrays) for name, arrays in _to_items(state).items()}
        if self._best is not None and score is not None:
            self._scores[step] = Score(self._best, score)
            items[SCORE] = ocp.args.JsonSave(self._scores[step]._asdict())
        if not healthy:
            self._unhealthy.add(step)
        self.wait()
        self._saving = step

        def save() -> None:
            with self._writing():
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)

        self._among_members(save)

    def restore(self, abstract: TrainState, which: Which = "newest") -> Checkpoint:
        """Return a checkpoint with the shapes, dtypes and shardings of `abstract`.

        The mesh may differ from the one it was written on. Raises ValueError with one line if there is no such
        checkpoint, its arrays differ from `abstract`, or a parameter is not finite. Assumes that `set_damaged_aside`
        has verified the checksums.
        """
        step, ahead = self.step_of(which), _without_empty(_on_host(abstract.ahead))
        abstract_items = _to_items(replace(abstract, ahead=ahead))
        for name, arrays in abstract_items.items():
            self._compare(step, name, arrays)
        items = self._read(step, abstract_items, ("data", "extra"))
        # The networks' parameters are an item of their own (see `_to_items`): put them back.
        state: TrainState = items["state"]
        state = replace(state, params=replace(state.params, **items["params"]["params"]))
        # Rollouts in flight are on other devices than the rest, and perhaps in other processes.
        like, structure = jax.tree.flatten(abstract.ahead)
        read = iter(processes.agree(jax.tree.leaves(state.ahead)))
        arrays = [next(read) if each.size else np.zeros(each.shape, each.dtype) for each in like]
        placed = [processes.place(x, each.sharding) for x, each in zip(arrays, like, strict=True)]
        state = replace(state, ahead=jax.tree.unflatten(structure, placed))
        check_finite(items["params"], self._directory / str(step))
        return Checkpoint(step, state, items["data"], items["extra"])

    def _read(self, step: int, abstract: dict[str, PyTree], names: Sequence[str] = ()) -> dict[str, Any]:
        """Return items of a checkpoint: arrays with the shardings of `abstract`, and JSON, by their names."""
        args = {name: _restore_args(arrays) for name, arrays in abstract.items()}
        args |= {name: ocp.args.JsonRestore() for name in names}
        read = dict[str, Any]()

        def restore() -> dict[str, Any]:
            read.update(self._manager.restore(step, args=ocp.args.Composite(**args)).items())
            return {name: read[name] for name in names}

        others = self._among_members(restore)
        return processes.placeholder(abstract) | others if self._manager is None else read

    def restore_params(self, abstract: Params, which: Which = "newest") -> tuple[Params, dict[str, Any]]:
        """Return policy, draft and `extra` of a checkpoint, without optimiser state and drafter memory. For generation.

        Raises as `restore` does, and DamagedSave if the files it reads do not match their checksums.
        """
        step = self.step_of(which)
        processes.on_primary(lambda: check_manifest(self._directory / str(step), ("params", "extra")))
        networks = _networks(abstract)
        self._compare(step, "params", networks)
        items = self._read(step, {"params": networks}, ("extra",))
        check_finite(items["params"], self._directory / str(step))
        return Params(**items["params"]["params"]), items["extra"]

    def restore_policy(self, abstract: PyTree, which: Which = "newest") -> tuple[PyTree, dict[str, Any]]:
        """Return the policy's parameters and `extra` of a checkpoint, with any or no draft.

        Raises as `restore_params` does.
        """
        step, policy = self.step_of(which), {"params": {"policy": abstract}}
        processes.on_primary(lambda: check_manifest(self._directory / str(step), ("params", "extra")))
        self._compare(step, "params", policy, "params.policy.")
        items = self._read(step, {"params": policy}, ("extra",))
        check_finite(items["params"], self._directory / str(step))
        return items["params"]["params"]["policy"], items["extra"]

    def step_of(self, which: Which) -> int:
        """Return the step of a checkpoint. Raises ValueError with one line if there is no such checkpoint."""
        self.wait()
        steps = self._all_steps()
        if which == "best":
            step = self.best_step()
            if step is None:
                raise ValueError(f"{self._directory}: best: no checkpoint has a score; name a step or newest")
            return step
        if not steps:
            raise ValueError(f"{self._directory}: no checkpoint yet; one counts once it is written whole")
        if which == "newest":
            return max(steps)
        if which not in steps:
            listed = ", ".join(map(str, sorted(steps)))
            raise ValueError(f"{self._directory}: no checkpoint of step {which}; must be one of {listed}")
        return which

    def _compare(self, step: int, item: str, abstract: PyTree, prefix: str = "") -> None:
        """Raise ValueError on a missing or additional array, shape or dtype. (Orbax silently casts dtypes.)

        Compares only arrays whose names start with `prefix`.
        """
        saved = self._among_members(lambda: _arrays(self._manager.item_metadata(step)[item].tree))
        expected = _arrays(abstract)
        for name in sorted(saved.keys() | expected.keys()):
            found, wanted = saved.get(name, "absent"), expected.get(name, "absent")
            if name.startswith(prefix) and found != wanted:
                raise ValueError(f"{self._directory / str(step)}: {name} is {found}, expected {wanted}")

    def _write_manifest(self) -> None:
        """Write the manifest of the checkpoint in progress. Orbax calls this before it renames the directory."""
        for path in self._directory.glob(f"{self._saving}.*tmp*"):
            write_manifest(path)
            if self._saving in self._unhealthy:
                (path / UNHEALTHY).touch()

    def _read_score(self, step: int) -> Score | None:
        try:
            processes.on_primary(lambda: check_manifest(self._directory / str(step), (SCORE,)))
            return Score(**self._read(step, {}, (SCORE,))[SCORE])
        except (DamagedSave, OSError, KeyError):  # damaged, being deleted, or without a score
            return None


class _KeepHealthy(ocp.checkpoint_managers.PreservationPolicy):
    """Policy that keeps the newest checkpoint, and the newest `count` healthy ones."""

    def __init__(self, saves: Checkpointer, count: int) -> None:
        self._saves, self._count = saves, count

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: ocp.checkpoint_managers.PreservationContext
    ) -> Sequence[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*steps[-1:], *self._saves.healthy(steps)[-self._count :]}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class _KeepBest(ocp.checkpoint_managers.PreservationPolicy):
    """Preservation policy that keeps the checkpoint with the best score.

    Orbax's BestN cannot be used: it reads all metrics at start-up and fails if one checkpoint's are damaged.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: ocp.checkpoint_managers.PreservationContext
    ) -> Sequence[bool]:
        best = self._checkpointer.best_step()
        return [checkpoint.step == best for checkpoint in checkpoints]


def _networks(params: Params) -> dict[str, PyTree]:
    return {"params": {"policy": params.policy, "draft": params.draft}}


def _to_items(state: TrainState) -> dict[str, PyTree]:
    """Return the two array items of a checkpoint: the networks, and the state without them.

    The networks are apart so that generation can read them alone. Frozen weights, adapters' base and a teacher, are not
    saved.
    """
    rest = replace(state, params=Params((), (), state.params.memory), teacher=None)
    return {"params": _networks(state.params), "state": rest}


def _without_empty(rollouts: PyTree) -> PyTree:
    """Return rollouts without arrays that hold nothing, as counts of no drafted token: Orbax refuses them."""
    return jax.tree.map(lambda x: x if x.size else None, rollouts)


def _on_host(abstract: PyTree) -> PyTree:
    """Return numpy arrays of these shapes and dtypes, which have no memory of their own: to restore as such."""
    return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), abstract)


def _restore_args(abstract: PyTree) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )


def _arrays(tree: PyTree) -> dict[str, str]:
    """Return {dotted path: dtype and shape} of all arrays. Example of a value: `float32[8, 16]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(tree)
    }
