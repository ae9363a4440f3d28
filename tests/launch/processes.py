"""Processes of this machine, read from /proc."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    return _stat(pid)[:1] not in ([], ["Z"])


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def children(pid: int) -> list[int]:
    """Return the living child processes of `pid`."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [child for child in pids if _stat(child)[1:2] == [str(pid)] and alive(child)]


def _stat(pid: int) -> list[str]:
    """Return the fields after a process's name in /proc/PID/stat (state, parent, ..); empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
