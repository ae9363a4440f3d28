"""Saves of a run: everything a resume needs, written in the background, each there as a whole or not at all."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from specjax.types import Params, PyTree, TrainState


class Checkpoint(NamedTuple):
    """What was saved at a step: the state, the position of the data pipeline, and whatever else the run keeps."""

    step: int
    state: TrainState
    data: dict[str, Any]
    extra: dict[str, Any]


class Checkpointer:
    """The saves in a directory. Leaving the `with` block waits until the last one is complete.

    keep: how many saves stay, the newest; None where they are only read, which may be while another process writes.
    """

    def __init__(self, directory: Path, keep: int | None = None) -> None:
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(create=False)
        if keep is not None:
            # What a killed process left half written never counts as a save; it is swept up by the next one.
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
            )
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """The newest step that is saved, or None. Waits for a save that is under way."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any], extra: dict[str, Any]) -> None:
        """Save in the background; the state may be donated at once. The newest step is not saved a second time.

        data, extra: JSON-serialisable. Raises what kept the save before from being completed.
        """
        if step != self._manager.latest_step():
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data), extra=ocp.args.JsonSave(extra)
            )
            self._manager.save(step, args=items, force=True)

    def restore(self, abstract: TrainState, step: int | None = None) -> Checkpoint:
        """The save of `step`, by default the newest, with the shapes, dtypes and shardings of `abstract`.

        The mesh may be another than the one it was saved on. Raises ValueError with one line where there is no such
        save or it holds other arrays.
        """
        step = self._checked_step(step, abstract, ("",))
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(state=_onto(abstract), data=ocp.args.JsonRestore(), extra=ocp.args.JsonRestore()),
        )
        return Checkpoint(step, items["state"], items["data"], items["extra"])

    def restore_params(self, abstract: Params, step: int | None = None) -> tuple[Params, dict[str, Any]]:
        """Both networks and `extra` of what `restore` would return, for generation; no moments, and no memory."""
        abstract = replace(abstract, memory=())
        step = self._checked_step(step, {"params": abstract}, ("params.policy.", "params.draft."))
        state = _onto({"params": abstract})
        items = self._manager.restore(step, args=ocp.args.Composite(state=state, extra=ocp.args.JsonRestore()))
        return items["state"]["params"], items["extra"]

    def restore_policy(self, abstract: PyTree, step: int | None = None) -> PyTree:
        """The policy's parameters of what `restore` would return, whatever else was saved."""
        like = {"params": {"policy": abstract}}
        step = self._checked_step(step, like, ("params.policy.",))
        return self._manager.restore(step, args=ocp.args.Composite(state=_onto(like)))["state"]["params"]["policy"]

    def _checked_step(self, step: int | None, abstract: PyTree, prefixes: tuple[str, ...]) -> int:
        """Arrays are compared here because orbax says it in many lines, and casts where only the dtype differs."""
        self._manager.wait_until_finished()
        found = self._manager.all_steps()
        if step is None and found:
            step = max(found)
        if step is None or step not in found:
            raise ValueError(f"{self._directory}: no save{'' if step is None else f' of step {step}'}")
        saved, expected = _arrays(self._manager.item_metadata(step).state.tree), _arrays(abstract)
        for name in sorted(saved.keys() | expected.keys()):
            there, here = saved.get(name, "absent"), expected.get(name, "absent")
            if name.startswith(prefixes) and there != here:
                raise ValueError(f"{self._directory / str(step)}: {name} is {there}, expected {here}")
        return step


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
