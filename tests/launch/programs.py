"""Helpers that run the programs of `launch` with tiny networks and problems, and read the results."""

import atexit
import functools
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs.override import override
from configs.schema import ArithmeticConfig, RunConfig
from launch.cli.fields import fields_of
from launch.cli.recipe_options import RECIPE_ONLY, reads
from launch.phases.long_phases import LongPhases
from launch.phases.signals import StopSignals
from launch.run.directory import CHECKPOINTS, open_run
from launch.setup.experiment import Experiment, build_experiment
from launch.train import train
from models.config import DecoderConfig
from specjax.checkpoint import Checkpointer
from specjax.drafters import Drafter
from specjax.rewards import RewardFn
from specjax.train.state import init_train_state
from specjax.types import Policy, PyTree, TrainState

DRAFT_LENGTH = 2
FIELDS = {field.flag: field for field in fields_of(RunConfig)}
# `--section.field` to words for the command line, and `section.field` to a value for the recipe.
Options = dict[str, Any]


def flags(*lines: str) -> Options:
    """Return options in the form of the command line, by name."""
    parts = (part.strip().partition(" ") for part in " ".join(lines).split("--")[1:])
    return {f"--{name}": value for name, _, value in parts}


def changes(*lines: str) -> Options:
    """Return the changes of a recipe that correspond to command-line options that not all programs have."""
    fields = {FIELDS[flag]: words.split() for flag, words in flags(*lines).items()}
    return {field.path: field.read(words) for field, words in fields.items()}


SHRUNK = changes(
    "--data.prompts 4 --data.max-prompt-tokens 40 --rollout.group-size 4 --rollout.max-new-tokens 8",
    f"--rollout.draft-length {DRAFT_LENGTH} --microbatches 2 --model.feature-layers 0 1 --model.dtype float32",
    "--policy-optimizer.learning-rate 0.01 --reward.workers 1 --eval.every 0 --probe-every 0",
) | {"rollout.draft_lengths": ()}
# Options that make the recipe `tiny` as small as possible, for runs of many steps.
LEAST = changes(
    *(f"--model.architecture.{name} 8" for name in ("hidden-size", "intermediate-size", "head-dim")),
    *(f"--model.architecture.{name} 1" for name in ("num-layers", "num-heads", "num-kv-heads")),
    "--model.dtype float32 --model.feature-layers 0 --mesh.data 1 --draft.intermediate-size 8",
    "--draft.lookup.kind history --data.arithmetic.problems 64 --data.arithmetic.max-terms 3 --data.held-out-count 16",
    "--data.max-prompt-tokens 6 --rollout.group-size 2 --rollout.max-new-tokens 16 --warmup.steps 0 --distill.steps 0",
    "--eval.every 0 --probe-every 0 --checkpoint.best rollout/acceptance_length",
)
# The recipe `tiny` in float32, to compare tokens. (jax's own attention fails in bfloat16 under strict promotion.)
FEW = changes(
    "--model.dtype float32 --model.architecture.hidden-size 16 --model.architecture.intermediate-size 16",
    "--model.architecture.num-layers 2 --model.architecture.num-heads 2 --model.architecture.num-kv-heads 1",
    "--model.architecture.head-dim 8 --model.feature-layers 0 1 --data.arithmetic.problems 64",
    "--data.arithmetic.max-terms 3 --data.held-out-count 16 --data.prompts 4 --data.max-prompt-tokens 6",
    "--rollout.max-new-tokens 20 --warmup.steps 2 --warmup.batch-size 4 --distill.steps 0",
)

ONE_LAYER = DecoderConfig(
    vocab_size=15, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
)
# A run without a recipe. Prompts and completions have at most 17 tokens.
SMALLEST = override(
    RunConfig(name="smallest", steps=1),
    {
        **{"model.architecture": ONE_LAYER, "model.dtype": "float32", "data.tokenizer": "characters"},
        **{"data.prompts": 2, "data.max_prompt_tokens": 10, "data.held_out_count": 4, "rollout.group_size": 2},
        **{"data.arithmetic": ArithmeticConfig(problems=24, max_terms=4), "rollout.max_new_tokens": 7},
        **{"rollout.draft_length": 2},
    },
)

Refusal = Callable[..., str]
"""The fixture of that name: a program, its arguments and the number of refusals -> a line for each."""


def argv(config: str, options: Options) -> list[str]:
    """Return a command line. Changes, and options that only recipes have, are written to a new recipe file.

    None leaves an option out.
    """
    changed, words = {}, []
    for name, value in options.items():
        if not name.startswith("--"):
            changed[name] = value
        elif name in FIELDS and reads(RECIPE_ONLY, FIELDS[name].path):
            changed |= changes(f"{name} {value}")
        elif value is not None:
            words += [name, *value.split(" ")]
    return [changed_recipe(config, repr(changed)) if changed else config, *words]


@functools.cache
def changed_recipe(config: str, changed: str) -> str:
    """Write a recipe with some fields changed (path -> value, in Python). Return its path."""
    path = Path(tempfile.mkdtemp()) / "recipe.py"
    atexit.register(shutil.rmtree, path.parent)
    imports = "from configs.override import override\nfrom launch.cli.recipes import load_recipe\n\n"
    path.write_text(f"{imports}config = override(load_recipe({config!r}), {changed})\n")
    return str(path)


def start(config: str, options: Options, *flags: str, program: str = "launch.train") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", program, *argv(config, options), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait until the program ends, verify that it succeeded, and return its output."""
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace wandb. Return a list to which its calls append: options of `init`, (step, values), "finish"."""
    calls: list[Any] = []

    def init(**options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


def share_programs(patch: pytest.MonkeyPatch, maker: str) -> None:
    """Let calls of a function that makes a program return the same one: each would be traced and lowered again.

    maker: its path. Its arguments are the policy, the drafter, an options dataclass and others; calls may differ only
           in the options and in the kind of the drafter.
    """
    module, _, name = maker.rpartition(".")
    make, made = getattr(importlib.import_module(module), name), dict[tuple[type, str], Any]()

    def shared(policy: Policy, drafter: Drafter, options: Any, *others: Any, **named: Any) -> Any:
        key = type(drafter), repr(options)
        if key not in made:
            made[key] = make(policy, drafter, options, *others, **named)
        return made[key]

    patch.setattr(maker, shared)


def run_to_the_end(config: RunConfig, reward_fn: RewardFn) -> tuple[TrainState, Experiment]:
    """Return the last state of a run in this process, and what it began with."""
    with open_run(config) as directory:
        experiment = build_experiment(config, takes_steps=True)
        state, _ = train(experiment, reward_fn, reward_fn, directory, StopSignals(print), LongPhases())
        return state, experiment


def leave_run(directory: Path, experiment: Experiment, vocabulary: list[int] | None = None) -> None:
    """Write the files of a run without steps that other programs read. vocabulary: of its draft; None: as it is."""
    with Checkpointer(directory / CHECKPOINTS, 1) as made:
        state = init_train_state(experiment.networks.params, experiment.config, experiment.mesh)
        made.save(1, state, {}, {"draft_vocabulary": vocabulary or experiment.draft_vocabulary})


def saves(run: Path) -> list[int]:
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def saved_state(run: Path, step: int) -> PyTree:
    """Return the arrays of a checkpoint as numpy arrays, because its devices may not exist here."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        return [_saved_item(checkpointer, run / "checkpoints" / str(step) / item) for item in ("params", "state")]


def _saved_item(checkpointer: ocp.PyTreeCheckpointer, path: Path) -> PyTree:
    names = checkpointer.metadata(path).item_metadata.tree
    arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
    return checkpointer.restore(path, restore_args=arrays)


def metrics(run: Path) -> list[dict[str, float | None]]:
    """Return the metrics of each step, without the evaluation before the first."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]


def without_times(run: Path, timed: tuple[str, ...] = ()) -> list[dict[str, float | None]]:
    """Return the metrics of each step that do not depend on the machine. timed: beginnings of others that do."""
    lines, left_out = metrics(run), ("time/", "perf/", "memory/", *timed)
    return [{name: line[name] for name in line if not name.startswith(left_out)} for line in lines]


def assert_same_run(run: Path, other: Path, step: int, timed: tuple[str, ...] = ()) -> None:
    """Verify that two runs have the same metrics, up to times, and the same state after `step`.

    timed: beginnings of further metrics that depend on the machine.
    """
    for line, expected in zip(without_times(run, timed), without_times(other, timed), strict=True):
        assert line == expected
    jax.tree.map(np.testing.assert_array_equal, saved_state(run, step), saved_state(other, step))
