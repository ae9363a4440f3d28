"""Saves of a run: everything a resume needs, written in the background, each there as a whole or not at all."""

from collections.abc import Sequence
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


# Which save: of a step, or the newest, or the one that scored highest.
Which = int | Literal["newest", "best"]


class Score(NamedTuple):
    """Score of a checkpoint: a metric of its step, the higher the better."""

    metric: str
    value: float


class Checkpointer:
    """The saves in a directory. Leaving the `with` block waits until the last one is complete.

    keep: how many saves stay, the newest; None where they are only read, which may be while another process writes.
    best: the metric by which the best save stays too; None for whichever was used last, where they are only read.
    """

    def __init__(self, directory: Path, keep: int | None = None, best: str | None = None) -> None:
        self._directory, self._best = directory.absolute(), best
        self._saving: int | None = None
        options = ocp.CheckpointManagerOptions(create=False)
        if keep is not None:
            policies: list[ocp.checkpoint_managers.PreservationPolicy] = [ocp.checkpoint_managers.LatestN(keep)]
            if best is not None:
                policies.append(_KeepBest(self))
            # What a killed process left half written never counts as a save; it is swept up by the next one.
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
        self._scores = {step: score for step in self._manager.all_steps() if (score := self._read_score(step))}

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def wait(self) -> None:
        """Until a save that is under way is complete. Raises what kept it from that."""
        self._manager.wait_until_finished()

    def best_step(self) -> int | None:
        """The step whose save scored highest by the metric of `best`, the newest of equals; None where none did."""
        metric = self._best or next((self._scores[step].metric for step in sorted(self._scores, reverse=True)), None)
        known = {step: score.value for step, score in self._scores.items() if score.metric == metric}
        return max(known, key=lambda step: (known[step], step), default=None)

    def save(
        self, step: int, state: TrainState, data: dict[str, Any], extra: dict[str, Any], score: float | None = None
    ) -> None:
        """Save in the background; the state may be donated at once. The newest step is not saved a second time.

        data, extra: JSON-serialisable. score: the metric of `best` at this step; None where it was not measured.
        Raises what kept the save before from being completed.
        """
        if step == self._manager.latest_step():
            return
        items = dict[str, Any](data=ocp.args.JsonSave(data), extra=ocp.args.JsonSave(extra))
        items |= {name: ocp.args.PyTreeSave(arrays) for name, arrays in _apart(state).items()}
        if self._best is not None and score is not None:
            self._scores[step] = Score(self._best, score)
            items["score"] = ocp.args.JsonSave(self._scores[step]._asdict())
        self.wait()
        self._saving = step
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, abstract: TrainState, which: Which = "newest") -> Checkpoint:
        """A save, by default the newest, with the shapes, dtypes and shardings of `abstract`.

        The mesh may be another than the one it was saved on. Raises ValueError with one line where there is no such
        save or it holds other arrays. That it is whole is known beforehand, from `set_damaged_aside`: its files are not
        read through once more.
        """
        step, parts = self.step_of(which), _apart(abstract)
        for name, arrays in parts.items():
            self._compare(step, name, arrays)
        args = {name: _onto(arrays) for name, arrays in parts.items()}
        items = self._manager.restore(
            step, args=ocp.args.Composite(**args, data=ocp.args.JsonRestore(), extra=ocp.args.JsonRestore())
        )
        rest: TrainState = items["state"]
        state = replace(rest, params=replace(rest.params, **items["params"]["params"]))
        return Checkpoint(step, state, items["data"], items["extra"])

    def restore_params(self, abstract: Params, which: Which = "newest") -> tuple[Params, dict[str, Any]]:
        """Both networks and `extra` of what `restore` would return, for generation; no moments, and no memory.

        Raises what `restore` does, and DamagedSave where what it reads is not what was written.
        """
        step = self.step_of(which)
        check_manifest(self._directory / str(step), ("params", "extra"))
        like = _networks(abstract)
        self._compare(step, "params", like)
        items = self._manager.restore(step, args=ocp.args.Composite(params=_onto(like), extra=ocp.args.JsonRestore()))
        return Params(**items["params"]["params"]), items["extra"]

    def restore_policy(self, abstract: PyTree, which: Which = "newest") -> PyTree:
        """The policy's parameters of what `restore_params` would return, whatever the draft beside it."""
        step, like = self.step_of(which), {"params": {"policy": abstract}}
        check_manifest(self._directory / str(step), ("params",))
        self._compare(step, "params", like, "params.policy.")
        items = self._manager.restore(step, args=ocp.args.Composite(params=_onto(like)))
        return items["params"]["params"]["policy"]

    def step_of(self, which: Which) -> int:
        """The step of a save. Raises ValueError with one line where there is no such save."""
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
        """Called when a save is written and has not yet the name under which it counts."""
        for path in self._directory.glob(f"{self._saving}.*tmp*"):
            write_manifest(path)

    def _read_score(self, step: int) -> Score | None:
        try:
            check_manifest(self._directory / str(step), ("score",))
            items = self._manager.restore(step, args=ocp.args.Composite(score=ocp.args.JsonRestore()))
        except (DamagedSave, OSError, KeyError):  # or being swept by another process, or without one
            return None
        return Score(**items["score"])


class _KeepBest(ocp.checkpoint_managers.PreservationPolicy):
    """Orbax's own BestN reads the metrics of all saves at the start, and fails where those of one are damaged."""

    def __init__(self, saves: Checkpointer) -> None:
        self._saves = saves

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: ocp.checkpoint_managers.PreservationContext
    ) -> Sequence[bool]:
        best = self._saves.best_step()
        return [checkpoint.step == best for checkpoint in checkpoints]


def _networks(params: Params) -> dict[str, PyTree]:
    return {"params": {"policy": params.policy, "draft": params.draft}}


def _apart(state: TrainState) -> dict[str, PyTree]:
    """The items that a state is saved as: the networks, which generation reads alone, and the rest."""
    return {"params": _networks(state.params), "state": replace(state, params=Params((), (), state.params.memory))}


def _onto(abstract: PyTree) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )


def _arrays(tree: PyTree) -> dict[str, str]:
    """Each array by its name, as text: `float32[8, 16]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(tree)
    }
