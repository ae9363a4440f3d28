"""What ends a run that no longer learns: updates whose gradients are not finite, step after step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launch.errors import RunStopped
from specjax.types import Prompts, Rollout


class SkippedUpdates:
    """Called with each step, saves the batch of the first in a row of which the policy's gradient was not finite.

    As `skipped_step_N.npz` in the directory, with the arrays of the prompts and of the rollout's completions. Raises
    RunStopped at the end of a row of `limit` steps in which all `updates` were skipped; 0 never does.
    """

    def __init__(self, directory: Path, limit: int, updates: int = 1) -> None:
        self._directory, self._limit, self._updates, self._row = directory, limit, updates, 0

    def __call__(self, step: int, metrics: Mapping[str, Any], prompts: Prompts, rollout: Rollout) -> None:
        self._row = self._row + 1 if int(metrics["update/skipped"]) == self._updates else 0
        if self._row == 1:
            self._saved = self._directory / f"skipped_step_{step}.npz"
            completions = {"tokens": rollout.tokens, "lengths": rollout.lengths, "log_probs": rollout.full}
            arrays = {f"prompt_{name}": x for name, x in vars(prompts).items()} | completions
            kept = {name: np.asarray(jax.device_get(x)) for name, x in arrays.items() if x is not None}
            np.savez(self._saved, **kept)  # pyright: ignore[reportArgumentType]
        if self._row and self._row == self._limit:
            raise RunStopped(
                f"step {step}: the policy's gradient was not finite in {self._limit} steps in a row, and nothing was "
                f"learnt in them; the batch of the first is in {self._saved}"
            )
