"""User functions, named by options as `package.module:name`.

This module imports nothing heavy, because scorer processes import it.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

from launch.errors import ConfigError, Stopped, first_line


def load_function(option: str, name: str, builtin: Iterable[str] = ()) -> Callable[..., Any]:
    """Import the function named by `package.module:name`. Modules in the working directory are found too.

    builtin: the option's other values, for the error message.
    Raises ConfigError if the import fails or the module has no such function.
    """
    module, _, function_name = name.partition(":")
    if module.endswith(".py"):
        meant = f"{module.removesuffix('.py').replace('/', '.')}:{function_name or 'NAME'}"
        raise ConfigError(f"{option} = {name}: must name a module, not its file: {meant}")
    with refusing_errors(option, name, f"be {', '.join([*builtin, 'package.module:name'])}"):
        found = importlib.import_module(module)
        try:
            function = getattr(found, function_name)
        except AttributeError as error:
            names = [name for name, value in vars(found).items() if callable(value)]
            closest = difflib.get_close_matches(function_name, names, n=1)
            hint = f" (did you mean {closest[0]}?)" if closest else ""
            raise AttributeError(f"{first_line(error)}{hint}") from None
        if not callable(function):
            raise TypeError(f"{function_name} is not a function")
    return function


@contextmanager
def refusing_errors(option: str, name: str, must: str) -> Iterator[None]:
    """Turn what the user's code raises into a ConfigError with a line: the error, where it was raised, and `must`.

    It may be any function of any module, called with what it does not take, and may exit.
    """
    try:
        yield
    except (ConfigError, Stopped, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{option} = {name}: {reason}{_place(name, error)}; must {must}") from error


def _place(name: str, error: BaseException) -> str:
    """Return the last line of the function's module that an error passed, as " (line N of FILE)"; "" if none."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {file})" if lines else ""
