"""Settings of all tests: 8 fake devices, strict promotion, and a compile cache that the workers share."""

import gc
import os
from pathlib import Path

from jaxlib.version import __version__ as jaxlib

# Tests mostly compile, and these two flags halve the time. Newer versions of jaxlib do not have the second.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if jaxlib.startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
# Recipes name checkpoints on the Hugging Face hub, which tests must not contact.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
# Tracing creates millions of objects. With Python's threshold of 700, garbage collection takes an eighth of the time.
gc.set_threshold(50_000, 10, 10)
