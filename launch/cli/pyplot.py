"""Import of matplotlib, for the programs that draw."""

import importlib
from typing import Any

from launch.cli.errors import ConfigError


def load_pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files. Raises ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError("plots: matplotlib is not installed: pip install 'specjax[bench]'") from error
