"""Hashes of the code of rewards, by which a resumed run tells that its reward is another one."""

import hashlib
import importlib.util
import inspect
import pprint
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tokenize import TokenError
from types import CellType, CodeType
from typing import Any

from configs.schema.functions import is_function


def code_of_modules(scorers: Sequence[str]) -> str | None:
    """Return a hash of the modules of those scorers that are the user's. None: there are none, or no files of them."""
    modules = sorted({name.partition(":")[0] for name in scorers if is_function(name)})
    try:
        texts = [file.read_bytes() for file in map(_file_of, modules) if file is not None]
    except (ImportError, OSError, ValueError):  # the scorers' processes report it
        return None
    return _hash(b"\0".join(texts)) if texts else None


def _file_of(module: str) -> Path | None:
    """Return the file of a module, None if there is none. Imports nothing: find_spec would run the packages around."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not parts:
        return None if spec is None or spec.origin is None else Path(spec.origin)
    paths = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next((file for file in files if file.is_file()), None)


def code_of_function(function: Callable[..., Any]) -> str | None:
    """Return a hash of a function: its source, or its bytecode if the source is not kept, and what it is bound to.

    That is the arguments of partials, defaults, variables of enclosing functions, and attributes of a callable object.
    None: it has neither source nor bytecode.
    """
    bound: list[Any] = []
    while isinstance(function, partial):
        bound += [*function.args, *function.keywords, *function.keywords.values()]
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = function.__call__
    if (code := _code(function)) is None:
        return None
    attributes = getattr(getattr(function, "__self__", None), "__dict__", {})
    bound += [*attributes, *attributes.values()]
    bound += [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
    bound += map(_content, getattr(function, "__closure__", None) or ())
    return _hash("\0".join([code, *map(_text, bound)]).encode())


def _code(function: Callable[..., Any]) -> str | None:
    """Return the source of a function, or its bytecode if the source is not kept. None: it has neither."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, SyntaxError, TokenError):  # as of text that was executed
        code = getattr(function, "__code__", None)
        return None if code is None else repr(_parts(code))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _text(value: Any) -> str:
    """Return a value as text that is the same in every process: a function's code, sets in order, no addresses."""
    if inspect.isfunction(value):
        return _code(value) or ""
    try:
        # One item a line: pprint sorts the sets that do not fit on a line.
        return re.sub(" at 0x[0-9a-f]+| with id=[0-9]+", "", pprint.pformat(value, width=1))
    except Exception:  # the user's
        return type(value).__name__


def _parts(code: CodeType) -> tuple[Any, ...]:
    """Return the bytecode, names and constants of a function, without the places of its lines."""
    constants = [_parts(each) if isinstance(each, CodeType) else _text(each) for each in code.co_consts]
    return code.co_code, code.co_names, constants


def _hash(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:16]
