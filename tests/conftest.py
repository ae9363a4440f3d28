"""Settings of all tests: 8 fake devices, strict promotion, and a compile cache that all processes share.

At its end a run says how many programs were compiled: they are most of its time.
"""

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jaxlib.version import __version__ as jaxlib

# Tests mostly compile. The first two flags halve the time; the third saves another sixth of XLA's, as code for one core
# is generated in one part, not 32. Newer versions of jaxlib do not have the second.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if jaxlib.startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
# In the environment, so that processes that tests start share the cache.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
# Recipes name checkpoints on the Hugging Face hub, which tests must not contact.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing creates millions of objects. With Python's threshold of 700, garbage collection takes an eighth of the time.
gc.set_threshold(50_000, 10, 10)

# Of this process, and in the end of all workers. Programs of the compile cache are not counted.
COMPILED: Counter[str] = Counter()


def _count_hits(event: str, **_: str | int) -> None:
    COMPILED["programs"] -= event == "/jax/compilation_cache/cache_hits"


def _count_programs(event: str, seconds: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.update({"programs": 1, "ms": round(1000 * seconds)})
    elif event == "/jax/compilation_cache/cache_retrieval_time_sec":
        COMPILED["ms"] -= round(1000 * seconds)


jax.monitoring.register_event_listener(_count_hits)
jax.monitoring.register_event_duration_secs_listener(_count_programs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiled"] = dict(COMPILED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COMPILED.update(getattr(node, "workeroutput", {}).get("compiled", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"{COMPILED['programs']} programs compiled in {COMPILED['ms'] / 1000:.0f} s, not counting processes that tests "
        "start"
    )
