"""Options of a run as its config.json records them, compared with those of a configuration."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.cli.recipe_options import reads
from models.files import read_json


def as_recorded(config: RunConfig) -> dict[str, Any]:
    """Return the options by dotted path, with the values that config.json holds: lists instead of tuples."""
    return flat(json.loads(json.dumps(dataclasses.asdict(config))))


def read_recorded(path: Path, option: str) -> dict[str, Any]:
    """Return the options of a config.json by dotted path. Raises ConfigError, naming `option`, if it is unreadable."""
    try:
        return flat(read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from None


def differences(config: RunConfig, recorded: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, recorded value) of each option that differs. Where one lacks it, its value is "absent".

    An option newer than the record counts as its default. In a network that a recipe describes, it counts as None.
    """
    values = as_recorded(config)
    defaults = as_recorded(RunConfig(name=config.name, steps=config.steps))
    for name in dict.fromkeys([*values, *recorded]):
        was, now = recorded.get(name, defaults.get(name, "absent")), values.get(name, "absent")
        if was != now and (was, now) != ("absent", None):
            yield name, now, was


def check_same(config: RunConfig, recorded: dict[str, Any], options: Sequence[str]) -> None:
    """Raise ConfigError if one of the options (patterns of launch.cli.recipe_options) differs from the run's."""
    for name, now, was in differences(config, recorded):
        if reads(options, name):
            raise ConfigError(f"{name} = {now}: the run has {was}")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves
