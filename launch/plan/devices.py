"""Descriptions of GPUs that are complete enough to compile for them without having one."""

import importlib.util
import math
import os
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.plan.options import PlanConfig
from specjax.parallel.mesh import AXES

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Autotuning times kernels, which needs a GPU. At level 0, XLA uses its default for each kernel.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0}


class Gpu(NamedTuple):
    """A GPU as XLA describes it (xla/backends/gpu/target_config/specs of openxla/xla).

    Attributes:
        name:       Device kind.
        capability: Major compute capability.
        cores:      Streaming multiprocessors.
        clock:      GHz.
        memory:     Bytes.
        bandwidth:  Bytes of memory per second.
        l2:         Bytes of the L2 cache.
        per_host:   GPUs of a host as it is sold.
    """

    name: str
    capability: int
    cores: int
    clock: float
    memory: int
    bandwidth: int
    l2: int
    per_host: int = 8

    @property
    def target(self) -> str:
        """Return the text of a `GpuTargetConfigProto`."""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {self.capability} }}
              core_count: {self.cores}
              fpus_per_core: 128
              clock_rate_ghz: {self.clock}
              memory_bandwidth: {self.bandwidth}
              device_memory_size: {self.memory}
              l2_cache_size: {self.l2}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
        """


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 9, 132, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800),
    "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864),
    "gb200": Gpu("NVIDIA GB200", 10, 152, 2.062, 197_897_748_480, 7_928_064_000_000, 135_528_448, per_host=4),
}


def planned(config: RunConfig, plan: PlanConfig) -> tuple[RunConfig, Mesh]:
    """Return the config with a mesh over all GPUs of the plan, and that mesh.

    Raises ConfigError if the mesh's size does not divide their number, or if jax's CUDA plugin is missing.
    """
    size = math.prod(config.mesh.shape)
    count = plan.gpus or size
    if count % size:
        raise ConfigError(f"plan.gpus = {count}: must be a multiple of the mesh's {size} devices, mesh = {config.mesh}")
    mesh = replace(config.mesh, data=config.mesh.data * (count // size))
    if plan.gpu == "cpu":
        devices = _cpu_devices(count)
    else:
        devices = absent_gpus(plan.gpu, count, plan.per_host)
    axes = (AxisType.Auto,) * len(AXES)
    return replace(config, mesh=mesh), Mesh(np.reshape(np.array(devices), mesh.shape), AXES, axis_types=axes)


def absent_gpus(name: str, count: int = 1, per_host: int | None = None) -> list[Any]:
    """Return devices to compile for. name: key of `GPUS`. Raises ConfigError without jax's CUDA plugin."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise ConfigError(
            f"plan.gpu = {name}: needs jax's CUDA plugin (pip install 'specjax[cuda]'); without it, --plan.gpu cpu "
            "compiles for CPUs, which need 2.5 to 3 times a GPU's temporary memory"
        )
    gpu = GPUS[name]
    per_host = min(count, per_host or gpu.per_host)
    if count % per_host:
        raise ConfigError(f"plan.per_host = {per_host}: must divide plan.gpus = {count}")
    # Without CUDA's libraries and a driver, the plugin can compile, but cannot start as a backend.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")
    topology = f"1x{count // per_host}x{per_host}"
    return list(topologies.get_topology_desc(platform="cuda", target_config=gpu.target, topology=topology).devices)


def _cpu_devices(count: int) -> list[Any]:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices exist already
        pass
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"plan.gpus = {count}: must be at most {len(devices)}, the CPU devices that already exist")
    return devices[:count]
