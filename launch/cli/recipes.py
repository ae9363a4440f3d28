"""Lookup of recipes by the name or path given as CONFIG."""

import runpy
from pathlib import Path

from configs.schema import RunConfig
from launch.cli.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "configs"


def recipes() -> list[str]:
    """Return the names allowed for CONFIG: the files in configs/ that define `config`."""
    return sorted(path.stem for path in RECIPES.glob("[a-z]*.py") if "\nconfig = " in path.read_text(encoding="utf-8"))


def choices() -> str:
    """Return the allowed values of CONFIG, for messages."""
    return f"one of {', '.join(recipes())}, or a path to such a .py file"


def load_recipe(name: str) -> RunConfig:
    """Load the `config` of a recipe: the name of a file in configs/, or the path of a .py file.

    Raises ConfigError if there is no such file, if it fails to run, or if its `config` is not a RunConfig.
    """
    path = RECIPES / f"{name}.py" if name in recipes() else Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"CONFIG = {name}: must be {choices()}")
    try:
        config = runpy.run_path(str(path)).get("config")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a recipe is a program, which may also exit
        raise ConfigError(f"CONFIG = {name}: {type(error).__name__}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"CONFIG = {name}: must define `config`, a RunConfig")
    return config
