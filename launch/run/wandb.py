"""Log a run's metrics to Weights & Biases; needs the extra [wandb]."""

import dataclasses
import importlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from specjax.parallel import processes

ID_FILE = "wandb_id"

Log = Callable[[int, Mapping[str, float]], None]


def check_wandb(project: str | None) -> None:
    """Raise ConfigError if a project is named but wandb is not installed."""
    if project is not None:
        _load(project)


@contextmanager
def wandb_log(config: RunConfig, directory: Path) -> Iterator[Log | None]:
    """Yield a function (step, metrics) that logs to Weights & Biases; None without a project, or if not the primary.

    A resumed run continues under its id, stored in `wandb_id` in its directory. Steps logged before it was killed keep
    their first values.
    """
    project = config.log.wandb_project
    if project is None or not processes.primary():
        yield None
        return
    path = directory / ID_FILE
    if not (config.resume and path.exists()):
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = _load(project).init(
        project=project,
        name=directory.name,
        dir=str(directory),
        config=dataclasses.asdict(config),
        id=path.read_text(encoding="utf-8"),
        resume="allow",
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


def _load(project: str) -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"log.wandb_project = {project}: wandb is not installed: pip install 'specjax[wandb]'"
        ) from None
