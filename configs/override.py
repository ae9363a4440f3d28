"""Read and change fields of a configuration by dotted path."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from configs.schema import DraftConfig, HeadConfig

T = TypeVar("T")


def override(config: T, values: Mapping[str, Any]) -> T:
    """Return a copy of a dataclass with new values by dotted path, such as {"rollout.law.temperature": 0.6}.

    All values of a section change at once, so its checks see only the final values. A draft of another kind keeps what
    both kinds read alike (`DraftConfig.replaced`). A failed check raises ValueError with the message
    `path.to.field = value: ...`.
    """
    changes = {path: value for path, value in values.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, rest = path.partition(".")
        if rest:
            nested.setdefault(section, {})[rest] = value
    for section, inner in nested.items():
        try:
            before = getattr(config, section)
            if isinstance(before, HeadConfig) and values.get("kind", config.kind) != config.kind:  # pyright: ignore
                before = HeadConfig()  # a draft of another kind keeps nothing of it
            changes[section] = override(before, inner)
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from error
    make: Any = config.replaced if isinstance(config, DraftConfig) else partial(replace, config)  # pyright: ignore
    return make(**changes)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves
