"""Errors of writing arrays: each library has its own, often of hundreds of lines. Here they become one."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path, whole: Callable[[], str] = str) -> Iterator[None]:
    """Turn every error of a block that writes to `path` into an OSError of one line.

    whole: says what earlier writes left whole. It is called after an error.
    """
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if code := re.search(r"os_error_code='(\d+)'", str(error)):  # within a page of TensorStore's
            reason = os.strerror(int(code[1]))
        reason = reason if len(reason) < 300 else f"{reason[:100]} .. {reason[-190:]}"
        left = whole()
        raise OSError(f"{path}: cannot be written: {reason}{left and f'; {left}'}") from error
