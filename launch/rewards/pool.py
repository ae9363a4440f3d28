"""A pool of scorer processes, for rewards that run on the host."""

import atexit
import json
import logging
import queue
import threading
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool

import numpy as np

from configs.schema.rewards import RewardConfig
from launch.cli.errors import ConfigError
from launch.rewards.process import Result, Sample, ScorerProcess

logger = logging.getLogger(__name__)

CHUNK = 8  # samples sent to a worker at a time; if one causes a restart, the rest of its chunk waits


def pattern_of(config: RewardConfig, scorer: str) -> str | None:
    """Return the `pattern` argument of `load_scorer` for a scorer."""
    return {"regex": config.pattern, "format": config.format}.get(scorer)


class RewardPool:
    """Processes that score completions against answers.

    The processes are spawned, never forked, because JAX has threads. They run those scorers of `config` that read text
    (all but `length`). A user's scorer is a function (completion, answer) -> number, 1.0 for correct.

    Raises ConfigError if a scorer cannot be imported. The processes end at `close`, at the end of the `with` block, and
    when the program ends in any way.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.scorers = [name for name in config.names if name != "length"]
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        scorers = json.dumps([(name, pattern_of(config, name)) for name in self.scorers])
        self._processes = [ScorerProcess(scorers, config.time_limit_s, self._closing) for _ in range(config.workers)]
        self._free: queue.SimpleQueue[ScorerProcess] = queue.SimpleQueue()
        # These threads start the processes and live as long as the pool: on Linux, a process gets its parent-death
        # signal when the thread that started it ends.
        self._threads = ThreadPool(config.workers)
        atexit.register(self.close)
        problems = self._threads.map(ScorerProcess.problem, self._processes, chunksize=1)
        for process, problem in zip(self._processes, problems, strict=True):
            self._free.put(process)
            if problem is not None:
                self.close()
                raise ConfigError(problem)

    def score(self, completions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Return the values, float32 [completions, scorers]. Thread-safe.

        A row is NaN if a scorer raised an exception, ran out of time or died. A value that is not finite becomes NaN.
        Raises RuntimeError after `close`.
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
        values = np.array([failed if isinstance(result, str) else result for result in results], np.float64)
        values = values.reshape(len(results), len(self.scorers))
        return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)

    def close(self) -> None:
        """Stop the processes. Calls of `score` that are waiting return NaN."""
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
                logger.warning(
                    "a sample was not scored: scorer %s (shown once; the metric reward/failed counts them)", reason
                )
