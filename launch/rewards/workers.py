"""Worker processes that run scorers, and the pool that shares samples among them.

A scorer may hang, die, fork, print, or write to any descriptor of its process. The pool therefore trusts nothing that a
worker sends: messages are JSON, never pickle, and it limits both waits and lengths. `launch.rewards.worker` describes
the messages.
"""

import atexit
import json
import logging
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from configs.schema.rewards import RewardConfig
from launch.errors import ConfigError, one_line
from launch.jobs.guarded import START_LIMIT_S, PrintedLines, end_guard, start_guard
from launch.jobs.silence import waiting_for
from launch.rewards.answers import AnswerRule, Completion
from launch.rewards.scorers import MUST_RETURN, option_of

logger = logging.getLogger(__name__)

CHUNK = 8  # samples sent to a worker at a time; if one causes a restart, the rest of its chunk waits
LONGEST_MESSAGE = 2**20  # bytes; a message holds one value per scorer, or a short text

# The text of a completion, the answer in it, and its problem as a JSON object or the text of the answer.
Sample = tuple[str, str | None, str | dict[str, Any]]
# The value of each scorer, or the reason why there are none.
Result = list[float] | str


class RewardPool:
    """Processes that score completions of problems.

    The processes are spawned, never forked, because JAX has threads. They run those scorers of `config` that read text
    (all but `length`). A user's scorer is a function (completion, answer) or (completion, problem) -> number, 1.0 for
    correct.

    stop_strings: texts that end a completion, as the rollout has them.
    turns:   whether completions may have several turns.

    Raises ConfigError if a scorer cannot be imported. The processes end at `close`, at the end of the `with` block, and
    when the program ends in any way.
    """

    def __init__(self, config: RewardConfig, stop_strings: Sequence[str] = (), turns: bool = False) -> None:
        self.config, self.rule = config, AnswerRule(config.thinking, tuple(stop_strings), turns)
        self.scorers = [name for name in config.names if name != "length"]
        self._label = f"reward.scorer = {', '.join(self.scorers)}"
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._printed = PrintedLines(self._label)
        output = self._printed.descriptor
        self._workers = [Worker(config, self.scorers, output, self._closing) for _ in range(config.workers)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        # These threads start the processes and live as long as the pool: on Linux, a process gets its parent-death
        # signal when the thread that started it ends.
        self._threads = ThreadPool(config.workers)
        atexit.register(self.close)
        try:
            self._threads.map(Worker.start, self._workers, chunksize=1)
        except (ConfigError, OSError) as error:
            self.close()
            names_option = isinstance(error, ConfigError)
            raise ConfigError(str(error) if names_option else f"{self._label}: does not start: {error}") from None

    def score(self, completions: Sequence[str | Completion], problems: Sequence[str | dict[str, Any]]) -> np.ndarray:
        """Return the values, float32 [completions, scorers]. Thread-safe. The first failure of each kind is logged.

        completions: text, in which the answer is found by `rule`, or text and answer.
        problems:    {"prompt", "answer", "columns"} of each, or only the answer.

        A row is NaN if a scorer raised an exception, ran out of time or died. A value that is not finite becomes NaN.
        Raises RuntimeError after `close`.
        """
        results = self.results(completions, problems)
        if not self._closing.is_set():
            log_failures(self._label, results, self._reported)
        return as_values(results, len(self.scorers))

    def results(
        self, completions: Sequence[str | Completion], problems: Sequence[str | dict[str, Any]]
    ) -> list[Result]:
        """Return what `score` turns into values: each sample's, or the reason why there are none."""
        whole = [each if isinstance(each, Completion) else self._read(each) for each in completions]
        samples = [(each.text, each.answer, problem) for each, problem in zip(whole, problems, strict=True)]
        size = max(1, min(CHUNK, -(-len(samples) // len(self._workers))))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the reward pool is closed")
            scored = self._threads.map_async(self._score, chunks, chunksize=1)
        with waiting_for(self._label):
            return [result for chunk in scored.get() for result in chunk]

    def check_type(self, completion: str, problem: str | dict[str, Any]) -> None:
        """Raise ConfigError if a scorer returns text, a list or another thing that is never a reward for a sample.

        What else goes wrong is no error: a scorer need not be made for this completion.
        """
        (result,) = self._threads.apply(self._score, ([(*self._read(completion), problem)],))
        if isinstance(result, str) and MUST_RETURN in result:
            raise ConfigError(f"{self._label}: {result}")

    def _read(self, text: str) -> Completion:
        return Completion(text, self.rule.answer_in(text))

    def close(self) -> None:
        """Stop the processes. Calls of `score` that are waiting return NaN."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._threads.close()
        for worker in self._workers:
            worker.kill()
        self._threads.join()
        for worker in self._workers:
            worker.discard()
        self._printed.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score(self, samples: list[Sample]) -> list[Result]:
        worker = self._free.get()
        try:
            return worker.score(samples)
        finally:
            self._free.put(worker)


def log_failures(owner: str, results: Sequence[Result], reported: set[str]) -> None:
    """Log the first failure of each kind that is not in `reported`, and add it."""
    for reason in results:
        if isinstance(reason, str) and (kind := reason.partition(":")[0]) not in reported:
            reported.add(kind)
            logger.warning(
                "%s: a completion has no reward: %s (shown once; the metric reward/failed counts them)",
                *(owner, one_line(reason, 300)),
            )


def as_values(results: Sequence[Result], scorers: int) -> np.ndarray:
    """Return the values of results, float32 [results, scorers]; NaN for failures and what float32 cannot hold."""
    values = [[np.nan] * scorers if isinstance(result, str) else result for result in results]
    array = np.array(values, np.float64).reshape(len(results), scorers)
    return np.where(np.abs(array) <= np.finfo(np.float32).max, array, np.nan).astype(np.float32)


class Worker:
    """A worker process, which is replaced when it hangs, dies or sends an unexpected message. Not thread-safe.

    Args:
        config:  Its `time_limit_s` is for all scorers of one sample together.
        scorers: Their names.
        output:  File descriptor for what the scorers print.
        closing: Event that is set when the pool closes: samples that are still waiting then fail.
    """

    def __init__(self, config: RewardConfig, scorers: Sequence[str], output: int, closing: threading.Event) -> None:
        self._scorers = json.dumps([(name, config.pattern_of(name)) for name in scorers])
        self._names, self._types = scorers, [float] * len(scorers)
        self._limit_s = config.time_limit_s
        self._output = output
        self._closing = closing
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = self._request = 0

    def start(self) -> None:
        """Start the process, again if there is one. Raises ConfigError if it cannot import a scorer, else OSError."""
        self.discard()
        self._socket, theirs = socket.socketpair()
        self._received = b""
        with theirs:
            self._guard = start_guard("launch.rewards.worker", self._scorers, theirs, self._output)
        importing = 0
        while True:
            try:
                message = self._receive(START_LIMIT_S)
            except ChildProcessError as error:
                name, option = self._names[importing], option_of(importing)
                raise ConfigError(f"{option} = {name}: {error}, while it was imported; must be importable") from None
            match message:
                case [int() as pid, None]:
                    self._pid = pid
                    return
                case [int(), str() as problem]:
                    raise ConfigError(problem)
                case [int(), int(index)] if index < len(self._names):
                    importing = index
                case _:
                    raise ChildProcessError("mixed up: its process sent an unexpected message when it started")

    def score(self, samples: list[Sample]) -> list[Result]:
        """Return the values of each sample, or the reason why it has none as text."""
        results: list[Result] = []
        while len(results) < len(samples):
            try:
                if self._guard is None or self._ended():
                    self.start()
                self._request += 1
                remaining = samples[len(results) :]
                self._socket.settimeout(self._limit_s)
                self._socket.sendall(json.dumps([self._request, remaining]).encode() + b"\n")
                for index in range(len(remaining)):
                    results.append(self._result(index))
            except (ConfigError, OSError) as error:
                self.discard()
                results.append(str(error))
        return results

    def kill(self) -> None:
        """Tell the guard to stop the process and all that it started. Any thread may call it."""
        if (guard := self._guard) is not None:
            guard.terminate()

    def discard(self) -> None:
        """Stop the process and all that it started, and wait for the end. Does nothing without a process."""
        if self._guard is not None:
            end_guard(self._guard)
            self._guard = None
            self._socket.close()

    def _result(self, index: int) -> Result:
        """Return the result of sample `index` of the current request. Raises ChildProcessError on any other message."""
        expected = [self._request, index, self._pid]
        match self._receive(self._limit_s):
            case [*head, str() as reason] if head == expected:
                return reason
            case [*head, list() as values] if head == expected and list(map(type, values)) == self._types:
                return values
        raise ChildProcessError("mixed up: its process sent a message that is not the result of this sample")

    def _receive(self, limit_s: float) -> Any:
        """Return the worker's next message. Raises ChildProcessError if there is none."""
        if self._closing.is_set():
            raise ChildProcessError("stopped: the pool is closed")
        try:
            return json.loads(self._line(limit_s))
        except TimeoutError:
            raise ChildProcessError(f"hung: no value within {limit_s:g} s") from None
        except (ValueError, RecursionError):
            raise ChildProcessError("mixed up: its process sent a malformed message") from None
        except (EOFError, OSError):
            raise ChildProcessError("died: its process ended") from None

    def _line(self, limit_s: float) -> bytes:
        """Return the next line. Raises TimeoutError, ValueError if it is too long, and EOFError at the end."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            if len(self._received) > LONGEST_MESSAGE:
                raise ValueError
            if (remaining := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            if not (data := self._socket.recv(LONGEST_MESSAGE)):
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ended(self) -> bool:
        """Return True if the worker's end is closed and everything it sent has been received."""
        self._socket.settimeout(0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
