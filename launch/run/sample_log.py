"""Sample completions of a run, each token with its writer: samples.jsonl."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.console import console
from launch.data.prompts import prompt_text
from launch.data.tokenizers import token_texts
from launch.run.history import cut_after
from launch.setup.experiment import Experiment
from specjax.parallel import processes
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
        are null: the reward of a sample that was not scored, `stopped` of one that goes on in the next step, writers
        that a custom rollout function does not report.
        """
        # Indexed on the host: a program of the prompts' mesh would wait for the rollout under way there, and a process
        # without a device of the mesh has nothing to index.
        rewards = None if rollout.reward is None else rollout.reward.value
        columns = rollout.tokens, rollout.writer, rollout.stopped, rewards, rollout.done
        lengths, ids, (tokens, *others) = processes.fetch((rollout.lengths, prompts.id, columns))
        group, budget = len(lengths) // len(ids), rollout.tokens.shape[1]
        rows = np.arange(len(lengths)).reshape(-1, group).T.ravel()[: self._experiment.config.log.samples]
        completions = [
            self._completion(
                int(ids[row // group]), lengths[row], tokens[row], *(None if x is None else x[row] for x in others)
            )
            for row in rows
        ]
        line = {"step": step, "budget": budget, "lengths": lengths.tolist(), "completions": completions}
        if processes.primary():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _completion(
        self,
        problem: int,
        length: int,
        tokens: np.ndarray,
        writers: np.ndarray | None,
        stopped: Any,
        reward: Any,
        done: Any,
    ) -> dict[str, Any]:
        texts = token_texts(self._experiment.tokenizer, tokens[:length].tolist())
        written_by = [None] * length if writers is None else writers[:length].tolist()
        asked = self._experiment.problems.train[problem]
        return {
            "prompt": prompt_text(asked.prompt),
            "answer": asked.answer,
            "reward": float(reward) if reward is not None and np.isfinite(reward) else None,
            "stopped": None if stopped is None or done is not None and not done else bool(stopped),
            "pieces": [list(piece) for piece in zip(texts, written_by, strict=True)],
        }
