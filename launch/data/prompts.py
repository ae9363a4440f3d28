"""Prompts: text, or the messages of a conversation."""

import json
from typing import NamedTuple, TypeAlias

from launch.cli.errors import ConfigError
from launch.data.json_lines import field_value, text_field


class Message(NamedTuple):
    """One message of a conversation, for the model's chat template: role (system, user, assistant) and content."""

    role: str
    content: str


Prompt: TypeAlias = str | tuple[Message, ...]


def read_prompt(record: dict[str, object], field: str, where: str) -> Prompt:
    """Return the prompt in a field of a JSON object: text, or a list of objects with role and content.

    Raises ConfigError, naming `where`, for anything else, and if the last message is not the user's.
    """
    value = field_value(record, field, where)
    if not isinstance(value, list):
        return text_field(record, field, where)
    if not value or not all(isinstance(message, dict) for message in value):
        excerpt = json.dumps(value, default=str)[:80]
        raise ConfigError(
            f"{where}: field {field!r} must be text or a list of messages with role and content, not {excerpt}"
        )
    messages = tuple(Message(text_field(each, "role", where), _content(each, where)) for each in value)
    if messages[-1].role != "user" or not messages[-1].content:
        raise ConfigError(f"{where}: field {field!r} must end with a non-empty message whose role is user")
    return messages


def _content(message: dict[str, object], where: str) -> str:
    """Return the content of a message, which may be empty only if the message is the system's."""
    return "" if message.get("content") == "" else text_field(message, "content", where)


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as text to display: the contents of its messages, one per line."""
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)


def to_json(prompt: Prompt) -> str | list[dict[str, str]]:
    """Return the prompt in the form that `read_prompt` reads."""
    return prompt if isinstance(prompt, str) else [message._asdict() for message in prompt]
