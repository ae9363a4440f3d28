"""Strict settings for every test: 8 fake devices, no implicit promotion, a compile cache shared by the workers."""

import gc
import os
from pathlib import Path

from jaxlib.version import __version__ as jaxlib

# Most of a test is compiling, and these two flags halve it. Newer versions of jaxlib do not know the second.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if jaxlib.startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
# Names that a recipe has on the Hugging Face hub must not be looked up.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
# Tracing makes millions of objects: with Python's threshold of 700, collecting takes an eighth of a worker's time.
gc.set_threshold(50_000, 10, 10)
