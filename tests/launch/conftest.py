"""What the tests of the programs run them on."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.launch.checkpoints import write_checkpoint, write_problems
from tests.launch.programs import SHRUNK, Options


@pytest.fixture(scope="module")
def light_compilation() -> Iterator[None]:
    """Every program is run once and on little: what compiles fastest is best."""
    kept = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", kept)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy`, a checkpoint with a tokenizer, and problems to train and to evaluate on."""
    directory = tmp_path_factory.mktemp("files")
    write_checkpoint(directory / "policy")
    write_problems(directory / "train.jsonl", ["1", "2", "3"] * 4)
    write_problems(directory / "test.jsonl", ["1", "2", "3"])
    return directory


@pytest.fixture(scope="module")
def shrunk(files: Path) -> Options:
    data = {"--data.train": str(files / "train.jsonl"), "--data.held-out": str(files / "test.jsonl")}
    return SHRUNK | {"--model.path": str(files / "policy")} | data
