"""What ends a run that no longer learns: updates that are skipped, step after step."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.types import Prompts, Rollout

# Batches that stay on disk. The networks of a run's last save are nearest to those of the newest.
KEPT = 4
NAME = re.compile(r"skipped_step_(\d+)\.npz")


class SkippedUpdates:
    """Called with each step, saves the batch of every one that skipped an update, of the policy or of the draft.

    As `skipped_step_N.npz` in the directory, where the newest `KEPT` stay, and none of a step behind `last`, from which
    the run goes on. With the networks of a save, and the rows that its state replays, such a file is all that the
    losses were computed from: the prompts as `prompt_NAME`, and every array of the `TrainBatch` under its own name.

    reason: why the run is to end, in one line, from the end of the first row of `limit` steps on that each skipped an
            update; None before, and always with a limit of 0.
    """

    def __init__(self, directory: Path, limit: int, last: int = 0) -> None:
        self._directory, self._limit, self._row = directory, limit, 0
        self.reason: str | None = None
        for step, file in self._saved().items():
            if step > last:
                file.unlink()

    def __call__(self, step: int, metrics: Mapping[str, Any], prompts: Prompts, rollout: Rollout) -> None:
        """metrics: `draft/skipped` is absent where no draft is trained. rollout: with its batch."""
        if not int(metrics["update/skipped"]) + int(metrics.get("draft/skipped", 0)):
            self._row = 0
            return
        self._row += 1
        saved = self._save(step, prompts, rollout)
        if self._row == self._limit and self.reason is None:
            self.reason = (
                f"step {step}: updates were skipped in {self._limit} steps in a row, for a loss or a gradient that is "
                f"not finite; the batch of the last is in {saved}"
            )

    def _save(self, step: int, prompts: Prompts, rollout: Rollout) -> Path:
        path = self._directory / f"skipped_step_{step}.npz"
        arrays = {f"prompt_{name}": x for name, x in vars(prompts).items()} | vars(rollout.batch)
        kept = {name: np.asarray(jax.device_get(x)) for name, x in arrays.items() if x is not None}
        np.savez(path, **kept)  # pyright: ignore[reportArgumentType]
        files = self._saved()
        for old in sorted(files)[:-KEPT]:
            files[old].unlink()
        return path

    def _saved(self) -> dict[int, Path]:
        found = ((NAME.fullmatch(file.name), file) for file in self._directory.iterdir())
        return {int(match[1]): file for match, file in found if match}
