"""Environments by the names of a user's functions. Imports nothing heavy: every episode's process loads it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

FUNCTION_OPTION, TOOLS_OPTION = "environment.function", "environment.tools"


def named_functions(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (option, package.module:name) of each function that a spec names.

    spec: {"environment": name}, a class or function without arguments that returns an environment; or
          {"tools": [name, ..], "calls": the format in which the model calls them}.
    """
    if "environment" in spec:
        return [(FUNCTION_OPTION, spec["environment"])]
    return [(TOOLS_OPTION, name) for name in spec["tools"]]


def environment_maker(spec: Mapping[str, Any], functions: Sequence[Callable[..., Any]]) -> Callable[[], Any]:
    """Return the function that makes a new environment of a spec and the functions that it names."""
    if "environment" in spec:
        return functions[0]
    from launch.environments.tools import Tools

    return lambda: Tools(functions, spec["calls"])
