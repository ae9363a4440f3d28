"""Values between processes as bytes: JSON and raw arrays. Reading them runs no code of the sender, as pickle would."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
import numpy as np

# Packages whose exceptions `decode` rebuilds.
REBUILT = ("builtins", "launch", "specjax")
# Arrays begin at multiples of so many bytes.
_ALIGNED_TO = 64
# Smaller arrays are copied, so that they do not keep the whole message.
_SHARED_BYTES = 2**20


def encode(value: Any) -> bytes:
    """Return a value as bytes: the length of a header of JSON in 8 bytes, the header, and the arrays' contents.

    The value is None, a bool, number, text, numpy array or exception, or a list, tuple or dict of them. Raises
    TypeError for anything else.
    """
    arrays = list[np.ndarray]()
    header = json.dumps(_plain(value, arrays)).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNED_TO)
    parts = [part for x in arrays for part in (x.reshape(-1).view(np.uint8).data, bytes(-x.nbytes % _ALIGNED_TO))]
    return b"".join([len(header).to_bytes(8), header, *parts])


def decode(message: bytes | bytearray) -> Any:
    """Return the value of `encode`. Large arrays share the memory of a message that is a bytearray.

    Raises ConnectionError if the message is none of `encode`.

    An exception is of the first class among its own and its bases that is built in, or of launch or specjax; a base has
    its text.
    """
    rest = memoryview(message)

    def take(size: int) -> memoryview:
        nonlocal rest
        if not 0 <= size <= len(rest):
            raise ValueError("the message is cut")
        taken, rest = rest[:size], rest[size:]
        return taken

    try:
        return _value(json.loads(bytes(take(int.from_bytes(take(8))))), take)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        raise ConnectionError(
            "a message between processes is damaged, or not of this job; docs/many_hosts.md says who may send any"
        ) from None


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value as JSON, in which tuples, dicts, arrays and exceptions are objects. Append its arrays."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(each, arrays) for each in value]
        case tuple() if type(value) is tuple:
            return {"tuple": [_plain(each, arrays) for each in value]}
        case dict():
            return {"dict": [[_plain(each, arrays) for each in item] for item in value.items()]}
        case np.ndarray() | np.generic():
            if not _has_name(value.dtype):
                raise TypeError(f"array of {value.dtype}: cannot pass between processes")
            arrays.append(np.ascontiguousarray(value))
            return {"array": [value.dtype.name, value.shape]}
        case Exception():
            classes = [_name(each) for each in type(value).__mro__ if issubclass(each, Exception)]
            # Not `args`, which lack the file's name of an OSError.
            args = value.__reduce__()[1]
            return {"error": [classes, [x if isinstance(x, int | str | None) else str(x) for x in args], str(value)]}
    raise TypeError(f"{type(value).__name__}: cannot pass between processes")


def _value(plain: Any, take: Callable[[int], memoryview]) -> Any:
    """Return the value of `_plain`. take: returns so many bytes of its arrays, from the start on."""
    if isinstance(plain, list):
        return [_value(each, take) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "array":
        dtype, shape = jnp.dtype(content[0]), content[1]
        size = dtype.itemsize * math.prod(shape)
        x = np.frombuffer(take(size), np.uint8)
        take(-size % _ALIGNED_TO)
        shared = size >= _SHARED_BYTES and x.flags.writeable and x.view(dtype).flags.aligned
        return (x if shared else x.copy()).view(dtype).reshape(shape)
    made = {"tuple": tuple, "dict": dict, "error": lambda error: _error(*error)}[kind]
    return made(_value(content, take))


def _error(classes: Sequence[str], args: Sequence[Any], text: str) -> Exception:
    # Other packages' classes may do anything with their arguments.
    known = {_name(each): each for each in _subclasses(Exception) if each.__module__.partition(".")[0] in REBUILT}
    for index, name in enumerate(classes):
        with suppress(Exception):
            return known[name](*(args if index == 0 else [text]))
    return Exception(text)


def _has_name(dtype: np.dtype) -> bool:
    """Return whether `decode` gets the dtype from its name. It does not get texts, objects, and other byte orders."""
    with suppress(TypeError):
        return jnp.dtype(dtype.name) == dtype and not dtype.hasobject
    return False


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)
