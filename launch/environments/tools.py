"""Environment of plain Python functions that a model calls as tools. Imports nothing heavy."""

import inspect
import json
from ast import literal_eval
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launch.environments.answers import Step
from launch.environments.calls import Call, find_calls


class Tools:
    """A `TextEnvironment` that answers the calls of a turn by functions. A turn without calls ends the episode.

    Each call is answered by one message {"role": "tool", "name", "content"}, and "tool_call_id" if the call has one.
    Content is what the function returns: text as it is, other values as JSON. What goes wrong, from malformed JSON to
    an exception of the function, is answered by {"error": ..} as JSON, and the episode goes on.

    functions: plain or async, with distinct names.
    format:    how the model writes calls; a key of `launch.environments.calls.FORMATS`.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], format: str) -> None:
        self._functions, self._format = {function.__name__: function for function in functions}, format

    def step(self, turn: str) -> Step:
        """Run the calls in the text of a turn, one after the other. Return their answers in this order."""
        calls = find_calls(turn, self._format)
        return Step([self._answer(call) for call in calls], done=not calls)

    def _answer(self, call: Call) -> dict[str, str]:
        """Return the message that answers a call. Never raises."""
        try:
            content = self._run(call)
        except BaseException as error:  # a tool may exit, and the message of an exception may raise too
            content = _error_text(error)
        name = call.name if call.name in self._functions else "unknown"
        return {"role": "tool", "name": name, "content": content} | ({"tool_call_id": call.id} if call.id else {})

    def _run(self, call: Call) -> str:
        """Return the result of a call as text."""
        if call.fault:
            return _as_error(call.fault)
        function = self._functions.get(call.name)
        if function is None:
            return _as_error(f"unknown tool {call.name[:80]!r}; the tools are {', '.join(self._functions)}")
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            takes = ", ".join(map(str, inspect.signature(function).parameters.values()))
            return _as_error(f"{call.name}: {error}; its arguments are: {takes}")
        arguments = _read_texts(function, call.arguments) if call.are_texts else call.arguments
        result = function(**arguments)
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _as_error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


def _error_text(error: BaseException) -> str:
    """Return the answer that an exception gives."""
    try:
        return _as_error(f"{type(error).__name__}: {error}")
    except Exception:
        return _as_error(type(error).__name__)


def _read_texts(function: Callable[..., Any], arguments: dict[str, str]) -> dict[str, Any]:
    """Return arguments that are texts as values of the function's type hints."""
    hints = get_type_hints(function)
    return {name: _read_text(text, hints.get(name, str)) for name, text in arguments.items()}


def _read_text(text: str, hint: Any) -> Any:
    """Return the value that a text states where a type is expected; the text itself if it states none."""
    types = _types(hint)
    if NoneType in types and text.lower() in ("null", "none"):
        return None
    if str in types:
        return text
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        return literal_eval(text)  # models write True and None too
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _types(hint: Any) -> set[Any]:
    """Return the types that a type hint allows, without those of their items."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(_types, get_args(hint)))
    return {get_origin(hint) or hint}
