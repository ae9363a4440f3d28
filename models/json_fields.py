"""Reading the fields of a Hugging Face `config.json`: each error is one line with the field, its value and what it may
be.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown field, refused because it may change the forward"


def either(fields: Mapping[str, Any], one: str, other: str) -> tuple[str, Any]:
    """The name and value of whichever of two fields is there; where both are, they must agree."""
    a, b = fields.get(one), fields.get(other)
    if a is not None and b is not None and a != b:
        raise ValueError(f"{one} = {show(a)}: contradicts {other} = {show(b)}")
    return (one, a) if a is not None else (other, b)


def check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError unless the value is one of those allowed."""
    # JSON's true equals 1 in Python.
    if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
        raise ValueError(f"{name} = {show(value)}: must be {' or '.join(map(show, allowed))}")


def one_of(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    """The field, which must be there and be one of these."""
    if name not in fields:
        raise ValueError(f"{name}: missing, must be {' or '.join(map(show, allowed))}")
    check(name, fields[name], allowed)
    return fields[name]


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The field, a positive integer; without a default it must be there."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} = {show(value)}: must be a positive integer")
    return value


def number(fields: Mapping[str, Any], name: str) -> float:
    """The field, which must be there: a positive number."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} = {show(value)}: must be a positive number")
    return float(value)


def boolean(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The field, true or false; the default where it is missing or null."""
    value = fields.get(name)
    value = default if value is None else value
    check(name, value, (True, False))
    return value


def refuse_unknown(fields: Mapping[str, Any], known: set[str] | frozenset[str], prefix: str = "") -> None:
    """Raises ValueError for the first field, in the order of names, that is not known."""
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{prefix}{unknown[0]} = {show(fields[unknown[0]])}: {UNKNOWN}")


def show(value: Any) -> str:
    """As JSON, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
