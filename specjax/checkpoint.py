"""Checkpoints of a run: everything that a resume needs, written in the background. Each is complete or absent."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import orbax.checkpoint as ocp

from specjax.checkpoint_integrity import DamagedSave, check_manifest, write_manifest
from specjax.types import Params, PyTree, TrainState


class Checkpoint(NamedTuple):
    """Contents of a checkpoint: the state, the position of the data pipeline, and whatever else the run keeps."""

    step: int
    state: TrainState
    data: dict[str, Any]
    extra: dict[str, Any]


# A checkpoint: that of a step, the newest, or the one with the highest score.
Which = int | Literal["newest", "best"]


# Empty file in a checkpoint from which, or to which, an update was skipped.
UNHEALTHY = "unhealthy"


class Score(NamedTuple):
    """Score of a checkpoint: a metric of its step, the higher the better."""

    metric: str
    value: float


class Checkpointer:
    """Checkpoints in a directory. Leaving the `with` block waits until the last save is complete.

    keep: number of newest healthy checkpoints that are kept, beside the newest of all. None: read only, also while
          another process writes.
    best: metric whose best checkpoint is kept too. When reading, None: the metric that was used last.
    """

    def __init__(self, directory: Path, keep: int | None = None, best: str | None = None) -> None:
        self._directory, self._best = directory.absolute(), best
        self._saving: int | None = None
        options = ocp.CheckpointManagerOptions(create=False)
        if keep is not None:
            policies: list[ocp.checkpoint_managers.PreservationPolicy] = [_KeepHealthy(self, keep)]
            if best is not None:
                policies.append(_KeepBest(self))
            # A save that a killed process left incomplete never counts as a checkpoint. The next process deletes it.
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
            )
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={
                "params": ocp.PyTreeCheckpointHandler(),
                "state": ocp.PyTreeCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
                "score": ocp.JsonCheckpointHandler(),
            },
        )
        steps = self._manager.all_steps()
        self._scores = {step: score for step in steps if (score := self._read_score(step))}
        self._unhealthy = {step for step in steps if (self._directory / str(step) / UNHEALTHY).exists()}

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def wait(self) -> None:
        """Block until the save in progress is complete. Raise its error if it failed."""
        self._manager.wait_until_finished()

    def newest(self) -> int | None:
        """Wait for the save in progress, and return the step of the newest checkpoint, or None without one."""
        self.wait()
        return self._manager.latest_step()

    def newest_healthy(self) -> int | None:
        """Wait for the save in progress, and return the step of the newest healthy checkpoint, or None without one."""
        self.wait()
        return max(self.healthy(self._manager.all_steps()), default=None)

    def healthy(self, steps: Iterable[int]) -> list[int]:
        """Return those of the steps whose checkpoints are not marked as unhealthy."""
        return [step for step in steps if step not in self._unhealthy]

    def mark_unhealthy(self, step: int) -> None:
        """Mark a checkpoint: it then never takes the place of a healthy one among those that are kept."""
        self.wait()
        if step in self._manager.all_steps():
            self._unhealthy.add(step)
            (self._directory / str(step) / UNHEALTHY).touch()

    def best_step(self) -> int | None:
        """Return the step of the checkpoint with the highest score in the metric `best`, or None without a score.

        Of equal scores, the newest.
        """
        metric = self._best or next((self._scores[step].metric for step in sorted(self._scores, reverse=True)), None)
        known = {step: score.value for step, score in self._scores.items() if score.metric == metric}
        return max(known, key=lambda step: (known[step], step), default=None)

    def save(
        self,
        step: int,
        state: TrainState,
        data: dict[str, Any],
        extra: dict[str, Any],
        score: float | None = None,
        healthy: bool = True,
    ) -> None:
        """Save in the background, unless this step is already the newest. The state may be donated at once.

        data, extra: JSON-serialisable.
        score:       value of the metric `best` at this step; None if it was not measured.
        healthy:     False marks it as `mark_unhealthy` does.

        Raises the error of the previous save, if that failed.
        """
        if step == self._manager.latest_step():
            return
        items = dict[str, Any](data=ocp.args.JsonSave(data), extra=ocp.args.JsonSave(extra))
        items |= {name: ocp.args.PyTreeSave(arrays) for name, arrays in _to_items(state).items()}
        if self._best is not None and score is not None:
            self._scores[step] = Score(self._best, score)
            items["score"] = ocp.args.JsonSave(self._scores[step]._asdict())
        if not healthy:
            self._unhealthy.add(step)
        self.wait()
        self._saving = step
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, abstract: TrainState, which: Which = "newest") -> Checkpoint:
        """Return a checkpoint with the shapes, dtypes and shardings of `abstract`.

        The mesh may differ from the one it was saved on. Raises ValueError with one line if there is no such checkpoint
        or if its arrays differ from `abstract`. Does not verify checksums: `set_damaged_aside` has done that.
        """
        step, parts = self.step_of(which), _to_items(abstract)
        for name, arrays in parts.items():
            self._compare(step, name, arrays)
        args = {name: _restore_args(arrays) for name, arrays in parts.items()}
        items = self._manager.restore(
            step, args=ocp.args.Composite(**args, data=ocp.args.JsonRestore(), extra=ocp.args.JsonRestore())
        )
        # Saved without the networks' parameters (`_to_items`).
        state: TrainState = items["state"]
        state = replace(state, params=replace(state.params, **items["params"]["params"]))
        return Checkpoint(step, state, items["data"], items["extra"])

    def restore_params(self, abstract: Params, which: Which = "newest") -> tuple[Params, dict[str, Any]]:
        """Return both networks and `extra` of a checkpoint, for generation: no optimiser state, no drafter memory.

        Raises what `restore` raises, and DamagedSave if the files it reads do not match their checksums.
        """
        step = self.step_of(which)
        check_manifest(self._directory / str(step), ("params", "extra"))
        networks = _networks(abstract)
        self._compare(step, "params", networks)
        items = self._manager.restore(
            step, args=ocp.args.Composite(params=_restore_args(networks), extra=ocp.args.JsonRestore())
        )
        return Params(**items["params"]["params"]), items["extra"]

    def restore_policy(self, abstract: PyTree, which: Which = "newest") -> PyTree:
        """Return the policy's parameters of a checkpoint, whatever draft it holds. Raises as `restore_params` does."""
        step, policy = self.step_of(which), {"params": {"policy": abstract}}
        check_manifest(self._directory / str(step), ("params",))
        self._compare(step, "params", policy, "params.policy.")
        items = self._manager.restore(step, args=ocp.args.Composite(params=_restore_args(policy)))
        return items["params"]["params"]["policy"]

    def step_of(self, which: Which) -> int:
        """Return the step of a checkpoint. Raises ValueError with one line if there is no such checkpoint."""
        self.wait()
        found = self._manager.all_steps()
        if which == "best":
            step = self.best_step()
            if step is None:
                raise ValueError(f"{self._directory}: no save has a score to be the best by")
            return step
        if not found:
            raise ValueError(f"{self._directory}: no save")
        if which == "newest":
            return max(found)
        if which not in found:
            steps = ", ".join(map(str, sorted(found)))
            raise ValueError(f"{self._directory}: no save of step {which}, only of {steps}")
        return which

    def _compare(self, step: int, item: str, abstract: PyTree, prefix: str = "") -> None:
        """Raise ValueError on a missing array or another shape or dtype. (Orbax silently casts dtypes.)"""
        saved, expected = _arrays(self._manager.item_metadata(step)[item].tree), _arrays(abstract)
        for name in sorted(saved.keys() | expected.keys()):
            there, here = saved.get(name, "absent"), expected.get(name, "absent")
            if name.startswith(prefix) and there != here:
                raise ValueError(f"{self._directory / str(step)}: {name} is {there}, expected {here}")

    def _list_files(self) -> None:
        """Write the manifest into a save that is written but still has its temporary name. Called by Orbax."""
        for path in self._directory.glob(f"{self._saving}.*tmp*"):
            write_manifest(path)
            if self._saving in self._unhealthy:
                (path / UNHEALTHY).touch()

    def _read_score(self, step: int) -> Score | None:
        try:
            check_manifest(self._directory / str(step), ("score",))
            items = self._manager.restore(step, args=ocp.args.Composite(score=ocp.args.JsonRestore()))
        except (DamagedSave, OSError, KeyError):  # damaged, being deleted by another process, or saved without a score
            return None
        return Score(**items["score"])


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
    """Policy that keeps the best checkpoint.

    Orbax's BestN reads the metrics of all checkpoints at start-up and fails if those of one are damaged.
    """

    def __init__(self, saves: Checkpointer) -> None:
        self._saves = saves

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: ocp.checkpoint_managers.PreservationContext
    ) -> Sequence[bool]:
        best = self._saves.best_step()
        return [checkpoint.step == best for checkpoint in checkpoints]


def _networks(params: Params) -> dict[str, PyTree]:
    return {"params": {"policy": params.policy, "draft": params.draft}}


def _to_items(state: TrainState) -> dict[str, PyTree]:
    """Return the items that a state is saved as: the networks, so that generation can read them alone, and the rest."""
    return {"params": _networks(state.params), "state": replace(state, params=Params((), (), state.params.memory))}


def _restore_args(abstract: PyTree) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )


def _arrays(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of each array by its name, as text: `float32[8, 16]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(tree)
    }
