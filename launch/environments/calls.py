"""Calls of tools in the text of a turn, in the formats of model families. Imports nothing heavy."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from launch.errors import ConfigError

# Thinking up to its end; the prompt may have opened it. Thinking that does not end takes the rest of the text.
_THINKING = re.compile(
    r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)"
    r"|\A(?:(?!\[THINK\]).)*?\[/THINK\]|\[THINK\].*?(?:\[/THINK\]|\Z)",
    re.DOTALL,
)
# Raw line breaks in strings are allowed: models write code into arguments.
_DECODER = json.JSONDecoder(strict=False)


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
        name:      of the tool; "" if unknown.
        arguments: by name.
        id:        what the answer must name, in formats that number calls.
        fault:     why the call cannot be read, and how calls are written; "" if it can.
        are_texts: The arguments are texts, whatever their types: the tool's type hints say how to read them.
    """

    name: str
    arguments: dict[str, Any] = {}  # noqa: RUF012, never changed
    id: str = ""
    fault: str = ""
    are_texts: bool = False


class CallFormat(NamedTuple):
    """How a model family writes calls.

    Attributes:
        find:    text without thinking -> the calls in it, in order.
        example: of a call.
        markers: texts that must be in the decoded text of a turn, though they may be special tokens.
        signs:   texts that a chat template of the family has, all of them.
        without: a text that it does not have.
    """

    find: Callable[[str], list[Call]]
    example: str
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    without: str = "\0"


def find_calls(text: str, format: str) -> list[Call]:
    """Return the calls in the text of a turn, in order. Thinking holds none. A malformed call has a fault.

    format: a key of `FORMATS`.
    """
    how = f"; a call is written {FORMATS[format].example}"
    calls = FORMATS[format].find(_THINKING.sub("", text))
    return [call._replace(fault=call.fault + how) if call.fault else call for call in calls]


def format_of(template: str) -> str:
    """Return the format of calls that a chat template shows. Raises ConfigError if it shows none of `FORMATS`."""
    for name, format in FORMATS.items():
        if all(sign in template for sign in format.signs) and format.without not in template:
            return name
    raise ConfigError(
        f"environment.calls = None: the chat template shows no known format of calls; must be {', '.join(FORMATS)}"
    )


def _hermes(text: str) -> list[Call]:
    """Find <tool_call>{"name": .., "arguments": {..}}</tool_call>: Qwen2.5, Qwen3, Hermes, SmolLM3."""
    calls, at = list[Call](), 0
    while (at := text.find("<tool_call>", at)) >= 0:
        value, end = _json(text, at + len("<tool_call>"))
        if not isinstance(value, str) and not _HERMES_END.match(text, end):
            value = "text after the JSON object of a call"
        calls.append(Call("", fault=value) if isinstance(value, str) else _call(value))
        at = max(end, at + 1)
    return calls


_HERMES_END = re.compile(r"\s*(?:</tool_call>|\Z)")


def _qwen3_coder(text: str) -> list[Call]:
    """Find <tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder, Qwen3.5."""
    calls, at = list[Call](), 0
    while start := _FUNCTION.search(text, at):
        arguments, at = dict[str, Any](), start.end()
        while parameter := _PARAMETER.match(text, at):
            arguments[parameter[1].strip()] = parameter[2].removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        if start[1] is None:
            calls.append(Call("", fault="a call without <function=..>"))
        elif not _FUNCTION_END.match(text, at):
            calls.append(Call(start[1].strip(), fault="a function or a parameter that is not closed"))
        else:
            calls.append(Call(start[1].strip(), arguments, are_texts=True))
    return calls


_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>]*)>|<tool_call>(?!\s*<function=)")
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>")


def _llama3(text: str) -> list[Call]:
    """Find {"name": .., "parameters": {..}} as the whole text, perhaps several with ";" between: Llama 3.1 to 3.3."""
    text = text.strip()
    tagged = text.startswith("<|python_tag|>")
    text = text.removeprefix("<|python_tag|>").lstrip()
    calls, at = list[Call](), 0
    while text.startswith("{", at):
        value, end = _json(text, at)
        if isinstance(value, str):
            calls += [Call("", fault=value)] if tagged or '"name"' in text[at:] else []
            break
        if isinstance(value.get("name"), str) and {"parameters", "arguments"} & value.keys():
            calls.append(_call(value))
        at = end + len(text[end:]) - len(text[end:].lstrip(" \n;"))
    return calls or ([Call("", fault="no JSON object with name and parameters")] if tagged else [])


def _mistral(text: str) -> list[Call]:
    """Find [TOOL_CALLS] with a list of objects, or with name[ARGS]{..} or name{..}: Mistral."""
    calls, at = list[Call](), 0
    while (at := text.find("[TOOL_CALLS]", at)) >= 0:
        at += len("[TOOL_CALLS]")
        named = _NAMED.match(text, at)
        value, end = _json(text, named.end() if named else at)
        if isinstance(value, str):
            calls.append(Call(named[1] if named else "", fault=value))
        elif named:
            calls.append(_call({"name": named[1], "arguments": value, "id": named[2]}))
        else:
            calls += [_call(each) for each in (value if isinstance(value, list) else [value])]
        at = max(at, end)
    return calls


_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\])?")


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON object or list at or after white space, and where it ends; or text that says what is wrong."""
    at += len(text[at:]) - len(text[at:].lstrip())  # raw_decode allows no white space
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        return "JSON that is nested too deep", at
    except ValueError as error:
        return f"malformed JSON: {getattr(error, 'msg', error)}", at
    return (value, end) if isinstance(value, dict | list) else ("no JSON object", at)


def _call(value: Any) -> Call:
    """Return the call that a JSON value states."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return Call("", fault="a call that is no JSON object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(name, fault=f"arguments of {name} that are no JSON object")
    return Call(name, arguments, value["id"] if isinstance(value.get("id"), str) else "")


FORMATS = {
    "qwen3_coder": CallFormat(
        _qwen3_coder,
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ("<function=", "<parameter="),
    ),
    "hermes": CallFormat(
        _hermes,
        '<tool_call>\n{"name": "name", "arguments": {"key": "value"}}\n</tool_call>',
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ("<tool_call>", "arguments"),
        without="<arg_key>",  # of GLM, whose calls are no JSON
    ),
    "mistral": CallFormat(
        _mistral,
        '[TOOL_CALLS]name[ARGS]{"key": "value"} or [TOOL_CALLS] [{"name": "name", "arguments": {"key": "value"}}]',
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        ("[TOOL_CALLS]",),
    ),
    "llama3": CallFormat(
        _llama3,
        '{"name": "name", "parameters": {"key": "value"}}',
        ("<|python_tag|>",),
        ("ipython", '"parameters": '),
    ),
}
