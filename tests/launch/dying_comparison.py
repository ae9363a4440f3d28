"""Comparisons of two stub variants that die in their fifteenth turn, each in a way of its own.

`python -m tests.launch.dying_comparison DIR` writes DIR/WAY.json, DIR/WAY.txt with the output, and prints exit codes.
"""

import json
import os
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import launch.compare as program
from launch.comparison.options import CompareArgs
from launch.comparison.stage_times import STAGES
from launch.comparison.variants import PLAIN, StepTime
from specjax.types import Rollout

WAYS = "exception", "memory", "kill", "abort"
LAST = 15


def die(how: str) -> None:
    """End the process, or this turn, in one of four ways."""
    if how == "exception":
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")
    if how == "memory":
        raise MemoryError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os.abort()


def variant(seconds: float, how: str | None) -> SimpleNamespace:
    """Return a variant whose stages all take so many seconds, and which dies in the last turn unless `how` is None."""
    tokens: Any = np.array([[1, 2]], np.int32), np.array([2])
    rollout = Rollout(tokens=tokens[0], lengths=tokens[1])

    def time_step(number: int) -> StepTime:
        if number == LAST and how is not None:
            die(how)
        return StepTime(dict.fromkeys(STAGES, seconds), 6 * seconds, np.array([5]), rollout, {})

    return SimpleNamespace(time_step=time_step, chosen=None if how is None else [1])


def compare(directory: Path, how: str) -> None:
    """Run launch.compare's comparison on the stubs."""
    sys.stdout = (directory / f"{how}.txt").open("w", buffering=1)
    config = SimpleNamespace(
        name="stub",
        steps=LAST,
        reward=None,
        asynchronous=SimpleNamespace(lag=None),
        model=SimpleNamespace(dtype="bfloat16"),
        draft_training=SimpleNamespace(max_every=32),
        rollout=SimpleNamespace(lengths=(0, 3), verifier="rejection", function=None),
    )
    experiment: Any = SimpleNamespace(config=config, problems=SimpleNamespace(train=None), tokenizer=None)
    stubs: dict[str, Any] = {
        "synchronous": lambda experiment: experiment,
        "trained_networks": lambda *_: None,
        "make_pool": lambda reward: None,
        "scoring_of": lambda *_: lambda *_: None,
        "make_variants": lambda *_: ({PLAIN: variant(2.0, None), "3": variant(1.0, how)}, None),
    }
    for name, stub in stubs.items():
        setattr(program, name, stub)
    program.compare(experiment, CompareArgs(automatic=False, json=str(directory / f"{how}.json")))


def main() -> None:
    # Forked, so that JAX is imported once.
    children = {how: get_context("fork").Process(target=compare, args=(Path(sys.argv[1]), how)) for how in WAYS}
    for child in children.values():
        child.start()
        child.join()
    print(json.dumps({how: child.exitcode for how, child in children.items()}))


if __name__ == "__main__":
    main()
