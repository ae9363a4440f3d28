"""Descriptions of tools as chat templates get them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from launch.errors import ConfigError, first_line

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def tool_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schema of each function, from its signature, type hints and docstring.

    Async functions and bound methods are allowed. Raises ConfigError, naming the tool and what is missing, for one
    without a docstring in Google's style that describes every argument, or without type hints that JSON can state, and
    for two tools of one name.
    """
    schemas = [_schema(function) for function in functions]
    names = [schema["function"]["name"] for schema in schemas]
    for name in {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"environment.tools = {', '.join(names)}: two tools are named {name}; names must differ")
    return schemas


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function."""
    try:
        # transformers is optional.
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError:
        raise ConfigError(
            "environment.tools: their schemas need transformers: pip install -e '.[hf]' in a clone"
        ) from None
    if not inspect.isroutine(function):
        raise ConfigError(f"environment.tools = {function!r}: is no function; must be functions or bound methods")
    name = function.__name__
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in _UNNAMED:
                raise ValueError(f"argument {parameter} has no name for calls")
        return get_json_schema(function)
    except Exception as error:  # transformers raises types of its own, and type hints raise any
        raise ConfigError(
            f"environment.tools = {name}: {first_line(error)}; must have a docstring in Google's style that describes "
            "it and each argument, and a type hint for each argument"
        ) from error
