"""Options of a command line as the fields of dataclasses: their flags, their help, and values read from words."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: "True|False", NoneType: "None"}


@dataclass(frozen=True)
class Field:
    """A field of a dataclass, or of one nested in it.

    Attributes:
        path:    names of the sections and of the field, joined by dots.
        hint:    its type.
        default: its value unless an option sets it; dataclasses.MISSING if an option must.
        help:    what it means.
    """

    path: str
    hint: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return flag_of(self.path)

    @property
    def metavar(self) -> str:
        """What its value looks like."""
        return "|".join(map(_shape, sorted(_kinds(self.hint), key=lambda kind: kind is NoneType)))

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that these words stand for. Raises ValueError if they stand for none."""
        for kind in _kinds(self.hint):
            try:
                return _read(kind, words)
            except ValueError:
                continue
        raise ValueError(f"{self.path} = {' '.join(words) or 'nothing'}: must be {self.metavar}")


def flag_of(path: str) -> str:
    """Return the option that sets the field at `path`."""
    return f"--{path.replace('_', '-')}"


def fields_of(kind: type, value: object = None, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a dataclass, those of nested ones in their place.

    value: an instance whose values are the defaults; None takes those of the class.
    """
    hints, texts = get_type_hints(kind), attribute_texts(kind)
    for field in dataclasses.fields(kind):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        default = field.default if value is None else getattr(value, field.name)
        if value is None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        section: Any = next((each for each in _alternatives(hint) if dataclasses.is_dataclass(each)), None)
        if section is not None and not _kinds(hint, but=NoneType):
            unset = default is None or default is dataclasses.MISSING
            yield from fields_of(section, None if unset else default, f"{path}.")
        else:
            yield Field(path, hint, default, texts.get(field.name, ""))


def attribute_texts(kind: type) -> dict[str, str]:
    """Return what the `Attributes:` blocks of a class and of its bases say of each field."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        block = inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"^    (?=\w+: )", block, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(":")
            found[name] = " ".join(text.split())
    return found


def summary(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kinds(hint: Any, but: type | None = None) -> list[Any]:
    """Return those of a type's alternatives that words can stand for, None first."""
    readable = [
        kind
        for kind in _alternatives(hint)
        if kind is not but and (kind in _NAMES or get_origin(kind) in (Literal, tuple))
    ]
    return sorted(readable, key=lambda kind: kind is not NoneType)


def _shape(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return " ".join([*(_NAMES[each] for each in get_args(item) or (item,)), "..."])
    return _NAMES[kind]


def _read(kind: Any, words: Sequence[str]) -> Any:
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if item is str:
            return tuple(words)
        parts = [part for word in words for part in word.split(",")]
        if not get_args(item):
            return tuple(item(part) for part in parts)
        size = len(get_args(item))
        if len(parts) % size:
            raise ValueError
        return tuple(tuple(map(int, parts[i : i + size])) for i in range(0, len(parts), size))
    if kind is bool and not words:
        return True
    (word,) = words
    choices = {NoneType: {"None": None}, bool: {"True": True, "False": False}}.get(kind)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
    if choices is None:
        return kind(word)
    if word not in choices:
        raise ValueError
    return choices[word]
