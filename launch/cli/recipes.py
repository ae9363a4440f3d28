"""Lookup of the configuration that CONFIG names: a recipe, or the options of a run."""

import difflib
import runpy
from dataclasses import replace
from pathlib import Path

import configs
from configs.from_json import from_json, without_idle_options
from configs.schema import HostsConfig, RunConfig
from launch.cli.paths import CONFIG_FILE
from launch.errors import ConfigError
from models.files import read_json

RECIPES = Path(configs.__path__[0])


def recipes() -> list[str]:
    """Return the names allowed for CONFIG: the files in configs/ that define `config`."""
    return sorted(path.stem for path in RECIPES.glob("[a-z]*.py") if "\nconfig = " in path.read_text(encoding="utf-8"))


def choices() -> str:
    """Return the allowed values of CONFIG, for messages."""
    return f"one of {', '.join(recipes())}, a path to such a .py file, or the directory of a run"


def is_run(name: str) -> bool:
    """Return whether CONFIG names the directory of a run."""
    return name not in recipes() and (Path(name) / CONFIG_FILE).is_file()


def load_recipe(name: str) -> RunConfig:
    """Load the `config` of a recipe: the name of a file in configs/, or the path of a .py file.

    The directory of a run gives the options of the run, but not its directory and its hosts.

    Raises ConfigError if there is no such file, if it fails to run, or if its `config` is not a RunConfig.
    """
    if is_run(name):
        try:
            record = read_json(Path(name) / CONFIG_FILE)
            if "rollout" not in record:
                raise ValueError(f"{CONFIG_FILE} is not a run's; must be {choices()}")
            config = from_json(RunConfig, without_idle_options(record))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"CONFIG = {name}: {error}") from error
        return replace(config, out=None, resume=False, hosts=HostsConfig())
    path = RECIPES / f"{name}.py" if name in recipes() else Path(name)
    if "/" in name and not path.exists():
        raise ConfigError(f"CONFIG = {name}: there is no such file or directory; must be {choices()}")
    if path.suffix != ".py" or not path.is_file():
        meant = difflib.get_close_matches(name, recipes(), n=1, cutoff=0.8)
        hint = f"no such recipe (did you mean {meant[0]}?); " if meant else ""
        raise ConfigError(f"CONFIG = {name}: {hint}must be {choices()}")
    try:
        config = runpy.run_path(str(path)).get("config")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a recipe is a program, which may also exit
        raise ConfigError(f"CONFIG = {name}: {type(error).__name__}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"CONFIG = {name}: must define `config`, a RunConfig")
    return config
