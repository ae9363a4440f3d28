"""Save the batches whose updates were skipped, and stop a run that skips too many in a row."""

import re
from pathlib import Path

import numpy as np

from launch.run.step_timer import Step
from specjax.checkpoint import Checkpointer
from specjax.parallel import processes

# Number of files to keep. The newest stay: the last checkpoint is closest to the networks that they need.
KEPT = 4
NAME = re.compile(r"skipped_step_(\d+)\.npz")


class SkippedUpdates:
    """Observer of steps that saves the batch if an update of the policy or of the draft was skipped.

    The file is `skipped_step_N.npz` in the run's directory. It holds the prompts as `prompt_NAME` and every array of
    the `TrainBatch` under its own name. With the networks of a checkpoint, and the rows that its state replays, these
    are all inputs of the losses.

    limit:     end the run after this many steps in a row that skipped an update; 0: never.
    last_step: the step after which the run resumes. Files of later steps are deleted.
    reason:    one line that says why the run must end, or None.
    in_a_row:  number of last steps in a row that skipped an update.
    """

    def __init__(self, directory: Path, limit: int, last_step: int = 0) -> None:
        self._directory, self._limit, self.in_a_row = directory, limit, 0
        self.reason: str | None = None
        for step, file in self._files().items():
            if step > last_step and processes.primary():
                file.unlink()

    def __call__(self, step: Step) -> None:
        if not int(step.metrics["update/skipped"]) + int(step.metrics.get("draft/skipped", 0)):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        path = self._save(step)
        if self.in_a_row == self._limit and self.reason is None:
            self.reason = (
                f"step {step.number}: updates were skipped in {self._limit} steps in a row because a loss or a "
                f"gradient is not finite; the last batch is in {path}"
            )

    def _save(self, step: Step) -> Path:
        path = self._directory / f"skipped_step_{step.number}.npz"
        arrays = {f"prompt_{name}": x for name, x in vars(step.prompts).items()} | vars(step.rollout.batch)
        kept = processes.fetch({name: x for name, x in arrays.items() if x is not None})
        if processes.primary():
            np.savez(path, **kept)  # pyright: ignore[reportArgumentType]
            files = self._files()
            for old in sorted(files)[:-KEPT]:
                files[old].unlink()
        return path

    def _files(self) -> dict[int, Path]:
        matches = ((NAME.fullmatch(file.name), file) for file in self._directory.iterdir())
        return {int(match[1]): file for match, file in matches if match}


def describe_healthy(saves: Checkpointer) -> str:
    """Return which checkpoint of a run that skipped updates is healthy, and how to use it."""
    step = saves.newest_healthy()
    if step is None:
        return "there is no healthy checkpoint"
    return (
        f"the last healthy checkpoint is that of step {step}: other programs read it with --checkpoint-step {step}; to "
        "resume from it, move the newer ones away"
    )
