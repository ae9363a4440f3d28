"""Code that a stranger sends to the port of a job does not run: processes exchange only plain values."""

import ast
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from launch.errors import ConfigError, Stopped
from specjax.parallel.messages import decode, encode
from tests.faults.test_index import HERE
from tests.refusals import refuses

ROOT = HERE.parents[1]
PLAIN = [None, True, -3, 0.5, float("inf"), "\ud83d ü", [1, ("x", [])], {"a": {3: (1,)}, (1, 2): None}, 10**30]
ARRAYS = [
    *(np.arange(6, dtype=dtype).reshape(2, 3).T for dtype in (np.int8, np.uint32, np.float64, jnp.bfloat16)),
    *(np.zeros((0, 3), np.float32), np.ones((), bool), np.zeros(3, jnp.float8_e4m3fn), np.float32(1.5)),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_row_46_plain_values_pass_between_processes(value: Any) -> None:
    assert decode(encode(value)) == value


def test_row_46_arrays_pass_between_processes_to_the_bit() -> None:
    for expected, got in zip(ARRAYS, decode(encode({"x": ARRAYS}))["x"], strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape) and got.flags.writeable
        assert got.tobytes() == expected.tobytes()


def test_a_large_array_of_a_message_that_was_received_is_not_copied() -> None:
    large = np.arange(2**19, dtype=np.float32)
    for before in (b"", b"x", b"abc"):
        message = bytearray(encode({"before": np.frombuffer(before, np.uint8), "x" * (len(before) + 1): large}))
        got = decode(message)["x" * (len(before) + 1)]
        np.testing.assert_array_equal(got, large)
        assert got.flags.writeable and got.flags.aligned and np.shares_memory(got, np.frombuffer(message, np.uint8))


def test_row_46_an_error_is_the_same_in_every_process() -> None:
    for error in (ConfigError("a", "b"), Stopped(15, "stopped"), FileNotFoundError(2, "none", "x"), KeyError("x")):
        got = decode(encode(error))
        assert (type(got), str(got), vars(got)) == (type(error), str(error), vars(error))
    # A class that only the primary has is its nearest base here.
    error = type("Unknown", (ValueError,), {})("text")
    message = encode(error).replace(b"Unknown", b"Another")
    assert (type(decode(message)), str(decode(message))) == (ValueError, "text")
    # So is one of another package, whose class may do anything with its arguments.
    for error in (Unmakeable(3, "text"), json.JSONDecodeError("text", "doc", 1)):
        got = decode(encode(error))
        assert (type(got), str(got)) == (ValueError, str(error))


def test_row_46_other_values_do_not_pass() -> None:
    arrays = [np.array(["ab"]), np.array([None]), np.zeros(1, ">f4"), np.zeros(1, [("a", "f4")])]
    for value in (Path("x"), object(), pickle.loads, type, {"x": Path("y")}, *arrays):
        with pytest.raises(TypeError, match="cannot pass"):
            encode(value)


class Unmakeable(ValueError):
    def __init__(self, code: int, text: str) -> None:
        assert isinstance(code, int) and text == "text"
        super().__init__(text)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the code of a stranger ran",)


def framed(header: bytes, contents: bytes = b"") -> bytes:
    return struct.pack(">Q", len(header)) + header + contents


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(Evil()),
        *(b"", b"\xff" * 9, b"[1]", framed(b"[" * 10**5), framed(b'{"x": 1}'), framed(b"{}"), framed(b"\xff")),
        *(framed(b'{"array": ["O", [1]]}', bytes(8)), framed(b'{"array": ["float32", [3]]}', bytes(4))),
        *(framed(b'{"array": ["os.system", [1]]}'), framed(b'{"error": [["x"], ["ls"]]}'), encode(ARRAYS)[:-1]),
    ],
    ids=range(13),
)
def test_row_46_a_strangers_message_is_refused(message: bytes) -> None:
    with refuses("a message between processes ...docs/many_hosts.md", ConnectionError):
        decode(message)


def test_row_46_an_error_names_no_class_that_is_none() -> None:
    message = framed(b'{"error": [["subprocess.Popen", "os.system", "builtins.SystemExit"], ["ls"], "ls"]}')
    assert type(decode(message)) is Exception


def test_row_46_nothing_is_pickled() -> None:
    for path in (
        path for package in ("specjax", "models", "configs", "launch") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {*names} & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}, path
