"""User functions, named by options as `package.module:name`.

This module imports nothing heavy, because scorer processes import it.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from launch.cli.errors import ConfigError


def load_function(option: str, name: str, builtin: Iterable[str] = ()) -> Callable[..., Any]:
    """Import the function named by `package.module:name`. Modules in the working directory are found too.

    builtin: the option's other values, for the error message.
    Raises ConfigError if the import fails or the module has no such function.
    """
    module, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), function_name)
        if not callable(function):
            raise TypeError(f"{function_name} is not a function")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a module runs it, and it may exit
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        allowed = ", ".join([*builtin, "package.module:name"])
        raise ConfigError(f"{option} = {name}: {reason}; must be {allowed}") from error
    return function
