"""The command with which launch.diagnose checks the draft of a run, for alarms."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from launch.cli.fields import fields_of
from launch.cli.recipe_options import DIAGNOSE, RECIPE_ONLY, reads
from launch.cli.recipes import load_recipe, recipes

_ABSENT = object()


def diagnose_command(config: Mapping[str, Any], run: Path | None) -> str:
    """Return the launch.diagnose command for networks of a run, with the options in which it differs from its recipe.

    config: contents of config.json. If it names a recipe of one's own, the file is written as CONFIG.
    run:    directory of the run. None: the networks with which it starts.
    """
    name = config.get("name")
    # Of a recipe that is not ours, only names of files can be told from what the recipe says.
    recipe: dict[str, Any] = {path: _value(config, path) for path in _options() if not path.endswith(".path")}
    if name in recipes():
        defaults = json.loads(json.dumps(asdict(load_recipe(name))))
        recipe = {path: _value(defaults, path) for path in _options()}
    words = ["python", "-m", "launch.diagnose", name if name in recipes() else "CONFIG"]
    if run is not None:
        words += ["--checkpoint", str(run)]
    for path, flag in _options().items():
        value = _value(config, path)
        if value is not _ABSENT and value != recipe.get(path):
            words += [flag, *_words(value)]
    return shlex.join(words)


def _options() -> dict[str, str]:
    """Return the options of the recipe that launch.diagnose reads, by path. It has its own processes and devices."""
    return {
        field.path: field.flag
        for field in fields_of(RunConfig)
        if reads(DIAGNOSE, field.path) and not reads((*RECIPE_ONLY, "hosts"), field.path)
    }


def _value(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name, _ABSENT) if isinstance(tree, Mapping) else _ABSENT
    return tree


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for item in value for word in _words(item)]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]
