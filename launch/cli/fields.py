"""Command-line options made from the fields of dataclasses."""

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from launch.errors import ConfigError
from specjax.options import alternatives, show


@dataclass(frozen=True)
class Field:
    """A field of a dataclass, or of one nested in it.

    Attributes:
        path:    names of the sections and of the field, joined by dots.
        kinds:   the allowed types, None last.
        default: the value if no option sets it; dataclasses.MISSING if an option must.
        help:    description for --help.
    """

    path: str
    kinds: tuple[Any, ...]
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """Return the option that sets the field. argparse stores its value under the field's path."""
        return f"--{self.path.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """Return the form of the option's value for --help; a repeated item is shown once."""
        return "|".join(dict.fromkeys(map(_shape, self.kinds)))

    def add_to(self, parser: argparse.ArgumentParser | argparse._ArgumentGroup, positional: bool = False) -> None:
        """Add the field to a parser or an argument group, as an option or as a positional argument."""
        text, value = self.help, self.default
        if value not in (None, dataclasses.MISSING):
            text += f" [{' '.join(map(str, value)) or 'none' if isinstance(value, tuple) else value}]"
        parser.add_argument(
            self.path if positional else self.flag,
            metavar=self.path.upper() if positional else self.metavar,
            nargs="*" if get_origin(self.kinds[0]) is tuple else "?" if bool in self.kinds else None,
            const="True" if bool in self.kinds else None,
            help=text.replace("%", "%%"),
        )

    def read(self, words: list[str]) -> Any:
        """Parse command-line words into the field's value. Raise ConfigError if no type of the field accepts them."""
        for kind in reversed(self.kinds):
            try:
                return _read(kind, words)
            except (KeyError, ValueError, RecursionError):
                continue
        repeated = " ..." if get_origin(self.kinds[0]) is tuple else ""
        raise ConfigError(f"{self.path} = {show(' '.join(words))}: must be {self.metavar}{repeated}")


def fields_of(kind: type, value: object = None, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a dataclass; a nested dataclass is replaced by its own fields.

    value: an instance with the default values; None: the defaults of the class.
    """
    hints, texts = get_type_hints(kind), attribute_texts(kind)
    for field in dataclasses.fields(kind):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        default = field.default if value is None else getattr(value, field.name)
        if value is None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        types = alternatives(hint)
        kinds = [each for each in types if not dataclasses.is_dataclass(each) and each is not NoneType]
        if kinds:
            kinds += [NoneType] * (NoneType in types)
            yield Field(path, tuple(kinds), default, texts.get(field.name, ""))
        else:
            section: Any = next(filter(dataclasses.is_dataclass, types))
            yield from fields_of(section, default if dataclasses.is_dataclass(default) else None, f"{path}.")


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the description of each field, from the `Attributes:` blocks of a class and its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        block = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"^    (?=\w+: )", block, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(":")
            texts[name] = " ".join(text.split())
    return texts


def summary(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def _choices(kind: Any) -> dict[str, Any]:
    """Return the values of a bool, None or Literal type by their text; an empty dict for other types."""
    values = {bool: (True, False), NoneType: (None,)}.get(kind, get_args(kind) if get_origin(kind) is Literal else ())
    return {str(value): value for value in values}


def _shape(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return " ".join(_shape(each) for each in get_args(kind) if each is not Ellipsis)
    if get_origin(kind) is dict:
        return "JSON"
    if len(either := alternatives(kind)) > 1:
        return "|".join(map(_shape, either))
    return "|".join(_choices(kind)) or kind.__name__.upper()


def _read(kind: Any, words: list[str]) -> Any:
    """Parse words into a value of type `kind`. Raise KeyError or ValueError if they are not one."""
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        if rest != [Ellipsis]:
            return tuple(_read(each, [word]) for each, word in zip((item, *rest), words, strict=True))
        if str in (either := alternatives(item)) and len(either) > 1:
            return tuple(value for word in words for value in _numbers_or_text(word))
        if item is not str:
            words = [part for word in words for part in word.split(",")]
        size = len(get_args(item)) or 1
        if len(words) % size:
            raise ValueError
        return tuple(_read(item, words[i : i + size]) for i in range(0, len(words), size))
    (word,) = words
    if get_origin(kind) is dict:
        value = json.loads(word)
        if not isinstance(value, dict):
            raise ValueError
        return value
    if kind is NoneType:
        return {"none": None}[word.lower()]
    return _choices(kind)[word] if _choices(kind) else kind(word)


def _numbers_or_text(word: str) -> tuple[int | str, ...]:
    """Return the integers of a word, separated by commas; the word itself if it has anything else.

    Raises ValueError for None: an empty list of words is how to give nothing.
    """
    if word == "None":
        raise ValueError
    return tuple(map(int, word.split(","))) if re.fullmatch("-?[0-9]+(,-?[0-9]+)*", word) else (word,)
