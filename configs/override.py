"""Changing fields anywhere in a configuration by their dotted paths."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

T = TypeVar("T")


def override(config: T, values: Mapping[str, Any]) -> T:
    """Return a copy of a dataclass with new values for fields named by path, as in {"rollout.law.temperature": 0.6}.

    All values of a section change together, so that its checks see the result alone. Raises ValueError of the form
    `path.to.field = value: ...` if a check fails.
    """
    changes = {path: value for path, value in values.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, rest = path.partition(".")
        if rest:
            nested.setdefault(section, {})[rest] = value
    for section, inner in nested.items():
        try:
            changes[section] = override(getattr(config, section), inner)
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from error
    return replace(config, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
