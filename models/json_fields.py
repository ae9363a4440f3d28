"""Readers for the fields of a `config.json`. Each error is one line: the field, its value and what is allowed."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from specjax.options import MOST, MOST_DRAFTED, MOST_EXPERTS, MOST_LAYERS

UNKNOWN = "unknown field, refused because it may change the forward"
# Counts of what readers make one by one, from only the file's number. Sizes of arrays are compared with the arrays
# in the files, or with memory, before these are made.
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_target_layers"), MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), MOST_EXPERTS),
    "block_size": MOST_DRAFTED + 1,  # in slots, of which the anchor's may draft nothing
}


def either(fields: Mapping[str, Any], one: str, other: str) -> tuple[str, Any]:
    """Return the name and value of the field that is set, (other, None) if neither is.

    Raises ValueError if both are set and differ.
    """
    a, b = fields.get(one), fields.get(other)
    if a is not None and b is not None and a != b:
        raise ValueError(f"{one} = {show(a)}: contradicts {other} = {show(b)}")
    return (one, a) if a is not None else (other, b)


def check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    # JSON's true equals 1 in Python.
    if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
        raise ValueError(f"{name} = {show(value)}: must be {' or '.join(map(show, allowed))}")


def one_of(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    """Return a required field. Raises ValueError unless its value is one of those allowed."""
    if name not in fields:
        raise ValueError(f"{name}: missing; must be {' or '.join(map(show, allowed))}")
    check(name, fields[name], allowed)
    return fields[name]


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer within the bounds of its field. Without a default the field is required."""
    value, most = fields.get(name), _COUNTS.get(name.rpartition(".")[2], MOST)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} = {show(value)}: must be a positive integer, at most {most}")
    return value


def number(fields: Mapping[str, Any], name: str) -> float:
    """Return a required positive number, as a float."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} = {show(value)}: must be a positive number")
    return float(value)


def boolean(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a boolean, the default if the field is missing or null."""
    value = fields.get(name)
    value = default if value is None else value
    check(name, value, (True, False))
    return value


def texts(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of texts, empty if the field is missing or null."""
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} = {show(value)}: must be a list of strings")
    return value


def layer_ids(fields: Mapping[str, Any], name: str, offset: int = 0) -> tuple[int, ...]:
    """Return the layers that a list counts `offset` lower, empty if the field is missing or null."""
    ids = fields.get(name)
    ids = [] if ids is None else ids
    listed = isinstance(ids, list) and len(ids) <= MOST_LAYERS + 1
    if not listed or not all(type(i) is int and 0 <= i + offset <= MOST_LAYERS for i in ids):
        raise ValueError(f"{name} = {show(ids)}: must be a list of layers")
    return tuple(i + offset for i in ids)


def nested(fields: Mapping[str, Any], name: str, required: bool = False) -> dict[str, Any]:
    """Return an object, empty if the field is missing or null. Raise ValueError if it is then required."""
    value = fields.get(name)
    value = {} if value is None and not required else value
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {show(value)}: must be an object")
    return value


def refuse_unknown(fields: Mapping[str, Any], known: set[str] | frozenset[str], prefix: str = "") -> None:
    """Raise ValueError for the first unknown field, in alphabetical order."""
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{prefix}{unknown[0]} = {show(fields[unknown[0]])}: {UNKNOWN}")


def show(value: Any) -> str:
    """Return the value as JSON, cut to 80 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "an object of hundreds of levels"
    return text if len(text) <= 80 else text[:77] + "..."
