"""Sample completions of a run, each token with its writer: samples.jsonl."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from launch.build.experiment import Experiment
from launch.cli.console import console
from launch.data.prompts import prompt_text
from launch.data.tokenizers import token_texts
from launch.run.history import cut_after
from specjax.types import Prompts, Rollout

SAMPLES_FILE = "samples.jsonl"


class SampleLog:
    """Writes one line per logged step: the lengths of all completions, and the tokens of some.

    resume_step: the restored step. Lines of later steps are dropped.
    """

    def __init__(self, directory: Path, experiment: Experiment, resume_step: int | None = None) -> None:
        self._path, self._experiment = directory / SAMPLES_FILE, experiment
        if resume_step is not None:
            cut_after(self._path, resume_step, report=console.print)

    def due(self, step: int) -> bool:
        """Return whether to log this step: the first, the last, and steps with an evaluation."""
        config = self._experiment.config
        evaluated = config.eval.every > 0 and step % config.eval.every == 0
        return config.log.samples > 0 and (step in (1, config.steps) or evaluated)

    def write(self, step: int, prompts: Prompts, rollout: Rollout) -> None:
        """Append one line to samples.jsonl.

        The line is {"step", "budget", "lengths": [..], "completions": [{"prompt", "answer", "reward", "stopped",
        "pieces": [[text, specjax.types.Writer], ..]}, ..]}. Completions of different prompts come first. Unknown values
        are null: the reward of a sample that was not scored, writers that a custom rollout function does not report.
        """
        lengths, budget = np.asarray(rollout.lengths), rollout.tokens.shape[1]
        group = len(lengths) // len(prompts.id)
        rows = np.arange(len(lengths)).reshape(-1, group).T.ravel()[: self._experiment.config.log.samples]
        completions = [self._completion(row, int(prompts.id[row // group]), rollout) for row in rows]
        line = {"step": step, "budget": budget, "lengths": lengths.tolist(), "completions": completions}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _completion(self, row: int, problem: int, rollout: Rollout) -> dict[str, Any]:
        length = int(rollout.lengths[row])
        reward = np.nan if rollout.reward is None else float(rollout.reward.value[row])
        texts = token_texts(self._experiment.tokenizer, np.asarray(rollout.tokens[row, :length]).tolist())
        writers = [None] * length if rollout.writer is None else np.asarray(rollout.writer[row, :length]).tolist()
        asked = self._experiment.problems.train[problem]
        return {
            "prompt": prompt_text(asked.prompt),
            "answer": asked.answer,
            "reward": reward if np.isfinite(reward) else None,
            "stopped": None if rollout.stopped is None else bool(rollout.stopped[row]),
            "pieces": [list(piece) for piece in zip(texts, writers, strict=True)],
        }
