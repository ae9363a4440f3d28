"""Representation of what holds arrays or long lists, in one line: `__repr__ = short_repr` in the body of a class."""

import reprlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_WORDS = (type(None), bool, int, float, complex, str, bytes, PurePath, np.dtype)
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80


def short_repr(self: Any) -> str:
    """Return the repr of a dataclass or named tuple. Its fields are shown by `brief`, which reads no large array."""
    names = [field.name for field in fields(self) if field.repr] if is_dataclass(self) else self._fields
    shown = (f"{name}={brief(getattr(self, name, None))}" for name in names)
    return f"{type(self).__name__}({', '.join(shown)})"


def brief(value: Any) -> str:
    """Return a value in a few words. Arrays are counted, deleted ones too: a step may have donated them."""
    if _is_array(value):
        return _array(value)
    kind, arrays = type(value).__name__, list[Any]()
    with suppress(Exception):  # keys of several types, which JAX cannot sort, or a node of the user's
        arrays = [x for x in jax.tree.leaves(value) if _is_array(x)]
    if arrays:
        deleted = sum(map(_is_deleted, arrays))
        counted = f"{len(arrays)} array{'s' * (len(arrays) > 1)} of {sum(x.size for x in arrays):,} numbers"
        return f"{kind}({counted}{f', {deleted} deleted' * bool(deleted)})"
    if isinstance(value, _WORDS):
        return _shortened.repr(value)
    if isinstance(value, tuple | list | dict | set | frozenset):
        items = value.values() if isinstance(value, dict) else value
        short = not hasattr(value, "_fields") and all(isinstance(each, _WORDS) for each in items)
        return _shortened.repr(value) if short else f"{kind} of {len(value)}"
    return getattr(value, "__name__", kind)


def _array(value: Any) -> str:
    if not value.shape and not _is_deleted(value):
        with suppress(Exception):  # a tracer, a shape, or on another host
            return str(value.item())
    return f"{value.dtype}{[*value.shape]}{' deleted' * _is_deleted(value)}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple)


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted()
