"""Scores from the host: killable scorer processes."""

import atexit
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from configs.schema.rewards import RewardConfig
from launch.cli.errors import ConfigError

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # for importing the scorer
CHUNK = 8  # samples a worker takes at a time; the others of a chunk wait where one of them costs a restart

Sample = tuple[str, str]
# The number that each scorer says, or why there are none.
Result = list[float] | str


def pattern_of(config: RewardConfig, scorer: str) -> str | None:
    """Return the regular expression that `load_scorer` takes for that scorer."""
    return {"regex": config.pattern, "format": config.format}.get(scorer)


class RewardPool:
    """Processes that score completions against answers.

    They are started afresh, never forked: JAX is threaded. Theirs are the scorers of `config` that go by the text; one
    of a user's own is a function (completion, answer) -> number, 1.0 for correct.

    Raises ConfigError where a scorer cannot be imported. The processes end with `close`, with the `with` block, and
    with the program however it ends.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.scorers = [name for name in config.names if name != "length"]
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        scorers = json.dumps([(name, pattern_of(config, name)) for name in self.scorers])
        self._processes = [_Process(scorers, config.time_limit_s, self._closing) for _ in range(config.workers)]
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        # Daemon threads, which live as long as the pool: Linux ends a process when the thread that started it ends.
        self._threads = ThreadPool(config.workers)
        atexit.register(self.close)
        problems = self._threads.map(_Process.problem, self._processes, chunksize=1)
        for process, problem in zip(self._processes, problems, strict=True):
            self._free.put(process)
            if problem is not None:
                self.close()
                raise ConfigError(problem)

    def score(self, completions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Return the values, float32 [completions, scorers]; may be called from several threads.

        A row is NaN if a scorer raised, ran out of time or died; a value is NaN if it is no finite number. Raises
        RuntimeError once the pool is closed.
        """
        samples = list(zip(completions, answers, strict=True))
        size = max(1, min(CHUNK, -(-len(samples) // len(self._processes))))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the reward pool is closed")
            scored = self._threads.map_async(self._score, chunks, chunksize=1)
        results = [result for chunk in scored.get() for result in chunk]
        if not self._closing.is_set():
            self._report(results)
        failed = [np.nan] * len(self.scorers)
        values = np.asarray([failed if isinstance(result, str) else result for result in results], np.float64)
        values = values.reshape(len(results), len(self.scorers))
        return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)

    def close(self) -> None:
        """Stop the processes; waiting calls of `score` return NaN."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._threads.close()
        for process in self._processes:
            process.kill()
        self._threads.join()
        for process in self._processes:
            process.discard()
        atexit.unregister(self.close)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score(self, samples: list[Sample]) -> list[Result]:
        process = self._free.get()
        try:
            return process.score(samples)
        finally:
            self._free.put(process)

    def _report(self, results: Sequence[Result]) -> None:
        for reason in (result for result in results if isinstance(result, str)):
            kind = reason.partition(":")[0]
            if kind not in self._reported:
                self._reported.add(kind)
                logger.warning("a sample was not scored: scorer %s (said once; the metrics count them)", reason)


class _Process:
    """A scorer process, replaced whenever it hangs or dies. One thread at a time may use it."""

    def __init__(self, scorers: str, time_limit_s: float, closing: threading.Event) -> None:
        self._scorers = scorers  # as launch.rewards.worker takes them
        self._time_limit_s = time_limit_s
        self._closing = closing
        self._process: subprocess.Popen[bytes] | None = None
        # What the launcher can import, a scorer process can.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

    def problem(self) -> str | None:
        """Start the process and return what keeps it from coming up, or None."""
        try:
            self._start()
        except OSError as error:
            return str(error)
        return None

    def kill(self) -> None:
        """Stop the process and its children; may be called from any thread."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def score(self, samples: list[Sample]) -> list[Result]:
        """Return the values of each sample, or as text why it has none."""
        results: list[Result] = []
        while len(results) < len(samples):
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                self._pipe.send(samples[len(results) :])
                while len(results) < len(samples):
                    results.append(self._receive(self._time_limit_s))
            except OSError as error:
                self.discard()
                results.append(str(error))
        return results

    def _start(self) -> None:
        self.discard()
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "launch.rewards.worker", self._scorers, str(theirs.fileno())]
            # A session of its own: Ctrl-C is for the launcher alone, and a kill reaches what the scorer started.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        problem = self._receive(START_LIMIT_S)
        if problem is not None:
            raise ChildProcessError(problem)

    def _receive(self, limit_s: float) -> Any:
        """Return the process's next message. Raises ChildProcessError if there is none."""
        if self._closing.is_set():
            raise ChildProcessError("stopped: the pool is closed")
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise ChildProcessError("died: its process ended") from None
        raise ChildProcessError(f"hung: no value within {limit_s:g} s")

    def discard(self) -> None:
        """Stop the process, if there is one, and wait for it."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process = None
            self._pipe.close()
