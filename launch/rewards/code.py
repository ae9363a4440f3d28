"""Hashes of the code of rewards, by which a resumed run tells that its reward is another one."""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from configs.schema.functions import is_function


def code_of_modules(scorers: Sequence[str]) -> str | None:
    """Return a hash of the modules of those scorers that are the user's. None: there are none, or no files of them."""
    modules = sorted({name.partition(":")[0] for name in scorers if is_function(name)})
    try:
        specs = [importlib.util.find_spec(module) for module in modules]
        texts = [Path(spec.origin).read_bytes() for spec in specs if spec is not None and spec.origin is not None]
    except Exception:  # importing a parent package may raise anything, which the scorers' processes report
        return None
    return _hash(b"\0".join(texts)) if texts else None


def code_of_function(function: Callable[..., Any]) -> str | None:
    """Return a hash of a function's source, or of its bytecode if the source is not kept. None: it has neither."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        return _hash(inspect.getsource(function).encode())
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return None if code is None else _hash(repr(_parts(code)).encode())


def _parts(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, without the places of its lines."""
    constants = [_parts(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    # A set has another order in every process.
    constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in constants]
    return code.co_code, code.co_names, constants


def _hash(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:16]
