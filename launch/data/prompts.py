"""Prompts: text, or the messages of a conversation, perhaps with tools that the model may call."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from launch.data.json_lines import field_value, json_text, optional_value, parse_json, text_field, without_nulls
from launch.errors import ConfigError
from specjax.options import show

# Fields by which an assistant calls tools. Such a message may have no content.
CALLS = frozenset({"tool_calls", "function_call"})


class Message(NamedTuple):
    """One message of a conversation, for the model's chat template.

    role:    system, user, assistant or tool.
    content: its text; None for an assistant that only calls tools.
    extra:   its other fields, such as tool_calls, as JSON values.
    """

    role: str
    content: str | None
    extra: dict[str, Any] = {}  # noqa: RUF012, never changed

    @property
    def fields(self) -> dict[str, Any]:
        """The message as a JSON object, as `read_prompt` reads it and chat templates get it."""
        return {"role": self.role, "content": self.content, **self.extra}

    @property
    def text(self) -> str:
        """The message as text to display and compare: its content, then other fields as JSON."""
        extra = [json.dumps(self.extra, sort_keys=True)] if self.extra else []
        return "\n".join([*filter(None, [self.content]), *extra])


class Conversation(tuple[Message, ...]):
    """Messages with the tools that the model may call in it. Prompts are equal if their tools are.

    tools: their descriptions, as JSON values.
    """

    tools: Sequence[dict[str, Any]]

    def __new__(cls, messages: Iterable[Message], tools: Sequence[dict[str, Any]] = ()) -> "Conversation":
        made = super().__new__(cls, messages)
        made.tools = tools
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and super().__eq__(other) and [*self.tools] == [*tools_of(other)]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


Prompt: TypeAlias = str | tuple[Message, ...]

# The beginning of an object or a list of objects, as JSON or Python writes it.
_OBJECTS = re.compile(r"\s*(\[\s*)?\{\s*['\"]")
# Fields by which a message is known.
_MESSAGE_FIELDS = ({"role", "content"}, {"from", "value"})


def tools_of(prompt: Prompt) -> Sequence[dict[str, Any]]:
    """Return the tools of a prompt, as JSON values; none for text and plain tuples of messages."""
    return prompt.tools if isinstance(prompt, Conversation) else ()


def tool_texts(prompt: Prompt) -> list[str]:
    """Return the tools of a prompt as text to display and compare, which does not depend on the order of fields."""
    return [json.dumps(tool, sort_keys=True) for tool in tools_of(prompt)]


def read_prompt(record: dict[str, object], field: str, where: str, tools: str | None = None) -> Prompt:
    """Return the prompt in a field of a JSON object: text, or a list of objects with role and content, or its JSON.

    Content is text, or a list of parts of text, which are joined. Other fields that are not empty are kept. Raises
    ConfigError, naming `where`, for anything else, and if the last message is not the user's or a tool's.

    tools: field of the descriptions of tools, a list of objects or its JSON, which may be missing or empty.
    """
    prompt, described = _read_prompt(record, field, where), _read_tools(record, tools, where)
    if not described:
        return prompt
    return Conversation((Message("user", prompt),) if isinstance(prompt, str) else prompt, described)


def _read_prompt(record: dict[str, object], field: str, where: str) -> Prompt:
    value = messages_in(field_value(record, field, where), f"{where}: field {field!r}")
    if not isinstance(value, list | dict):
        return text_field(record, field, where)
    if isinstance(value, dict) or not value or not all(isinstance(message, dict) for message in value):
        excerpt = json.dumps(value, default=str)[:80]
        raise ConfigError(
            f"{where}: field {field!r} must be text or a list of messages with role and content, not {excerpt}"
        )
    messages = tuple(read_message(each, where) for each in value)
    asked = [message.content for message in messages if message.role == "user"]
    if messages[-1].role not in ("user", "tool") or not asked or not asked[-1]:
        raise ConfigError(
            f"{where}: field {field!r} must end with a non-empty message whose role is user, or with a tool's after it"
        )
    return messages


def messages_in(value: object, owner: str) -> object:
    """Return the value of which a text is the JSON, as files of CSV hold it, if it is messages; others unchanged.

    Messages are a list of them, one by itself, or an object that holds a list. Raises ConfigError, beginning with
    `owner`, for messages that are not JSON, such as a list as Python prints it.
    """
    if not isinstance(value, str) or not _OBJECTS.match(value) or not value.rstrip().endswith(("]", "}")):
        return value
    try:
        read = without_nulls(parse_json(value, f"{owner} = {show(value)}"))
    except (ConfigError, RecursionError) as error:
        names = {name for _, name in re.findall(r"""(['"])(\w+)\1\s*:""", value)}
        if not any(fields <= names for fields in _MESSAGE_FIELDS):
            return value
        raise ConfigError(f"{error}; must be JSON, with its quotes, to be messages") from None
    return read if _are_messages(read) else value


def _are_messages(value: Any) -> bool:
    if isinstance(value, dict):
        if any(fields <= value.keys() for fields in _MESSAGE_FIELDS):
            return True
        value = value.get("messages") or value.get("conversations")
    return isinstance(value, list) and all(
        isinstance(each, dict) and ("role" in each or {"from", "value"} <= each.keys()) for each in value
    )


def _read_tools(record: dict[str, object], field: str | None, where: str) -> list[dict[str, Any]]:
    """Return the descriptions of tools in a field of a record; none if it is missing or empty."""
    value = None if field is None else optional_value(record, field)
    described = _parsed(value)
    if described in (None, []) or (isinstance(described, str) and not described.strip()):
        return []
    tools = [*map(_parsed, described)] if isinstance(described, list) else [described]
    if isinstance(described, dict) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise ConfigError(
            f"{where}: field {field!r} = {show(value)}: must be a list of objects that describe tools, or its JSON; "
            "data.tools_field = None leaves it out"
        )
    return [_json_value(tool, str(field), where) for tool in tools]


def _parsed(value: object) -> Any:
    """Return what JSON text holds, without nulls; other text and other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(parse_json(value, ""))
    except (ConfigError, RecursionError):
        return value


def read_message(message: dict[str, Any], where: str) -> Message:
    """Return the message that a JSON object states, as `read_prompt` reads it."""
    message = with_tool_calls(message, where)
    given = {name: value for name, value in message.items() if name not in ("role", "content")}
    extra = {name: _json_value(value, name, where) for name, value in given.items() if value not in (None, [])}
    role, content = text_field(message, "role", where), message.get("content")
    if content is None and role == "assistant" and CALLS & extra.keys():
        return Message(role, None, extra)
    if isinstance(content, list):
        content = "".join(_text_of_part(part, where) for part in content)
        message = {"content": content}
    return Message(role, "" if content == "" else text_field(message, "content", where), extra)


def with_tool_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of ShareGPT's role function_call as one of the assistant with tool_calls, others unchanged.

    Its content is JSON: an object with name and arguments, or a list of them. Raises ConfigError, naming `where`, for
    anything else.
    """
    if message.get("role") != "function_call":
        return message
    content = message.get("content")
    value = _parsed(content)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise ConfigError(
            f"{where}: content of a function_call = {show(content)}: must be JSON, an object with name and arguments, "
            "or a list of them"
        )
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return message | {"role": "assistant", "content": None, "tool_calls": tool_calls}


def _json_value(value: object, name: str, where: str) -> Any:
    """Return the value of a field of a message as JSON has it. Raises ConfigError if that is impossible."""
    try:
        text = json_text(value, strict=True)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: field {name!r} of a message: {error}; must be finite JSON values") from None
    return json.loads(text)


def _text_of_part(part: Any, where: str) -> str:
    """Return the text of a part of a content. Raises ConfigError for a part of another type or with other fields."""
    fields = part if isinstance(part, dict) else {"text": part}
    fields = {name: value for name, value in fields.items() if value is not None}
    text, kind = fields.pop("text", None), fields.pop("type", "text")
    if kind != "text" or fields or not isinstance(text, str):
        raise ConfigError(
            f"{where}: field 'content' has a part of type {kind!r} with {', '.join(map(repr, fields)) or 'no text'}; "
            "must be text, or a list of parts of text"
        )
    return text


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as text to display and compare: its tools and its messages, one per line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join([*tool_texts(prompt), *(message.text for message in prompt)])


def prompt_fields(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Return the prompt in the form that `read_prompt` reads, without its tools."""
    return prompt if isinstance(prompt, str) else [message.fields for message in prompt]
