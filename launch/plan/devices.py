"""Descriptions of GPUs that are complete enough to compile for them without having one."""

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from configs.schema import RunConfig
from launch.errors import ConfigError, RunStopped, as_config_error, first_line
from launch.plan.options import PlanConfig
from specjax.asynchronous.weight_transfer import check_sizes
from specjax.cost import HARDWARE, Hardware
from specjax.options import nearest_divisors, nearest_multiples
from specjax.parallel.mesh import AXES, MeshConfig

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Autotuning times kernels, which needs a GPU. At level 0, XLA uses its default for each kernel.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0}
# The time of these passes grows with the square of the program: for the update of 94 layers of experts, over 20 minutes
# each. The second runs where a program does not fit, and would hide by how much.
PLAN_OPTIONS = COMPILER_OPTIONS | {"xla_disable_hlo_passes": "multi_output_fusion,rematerialization"}
# XLA has no default for some products by Triton, and fails; jax 0.11 for many. cuBLAS takes them all.
CUBLAS_OPTIONS = PLAN_OPTIONS | {"xla_gpu_enable_triton_gemm": False}
# Tried in this order until XLA accepts one.
OPTION_SETS = (CUBLAS_OPTIONS, PLAN_OPTIONS) if jax.__version_info__ >= (0, 11) else (PLAN_OPTIONS, CUBLAS_OPTIONS)


def target(hardware: Hardware) -> str:
    """Return the text of the `GpuTargetConfigProto` by which XLA compiles for a device."""
    chip = hardware.chip
    assert chip is not None
    return f"""
        platform_name: "CUDA"
        device_description_str: "{hardware.name}"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 12 minor: 8 }}
        gpu_device_info {{
          cuda_compute_capability {{ major: {chip.capability} }}
          core_count: {chip.cores}
          fpus_per_core: 128
          clock_rate_ghz: {chip.clock}
          memory_bandwidth: {hardware.bandwidth:.0f}
          device_memory_size: {hardware.memory:.0f}
          l2_cache_size: {chip.l2}
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


def planned(config: RunConfig, plan: PlanConfig) -> tuple[RunConfig, Mesh, Mesh]:
    """Return the config with meshes over all GPUs of the plan, the mesh that trains and the one that generates.

    They are one unless the run is asynchronous. Raises ConfigError if their size does not divide the number of GPUs, or
    if jax's CUDA plugin is missing.
    """
    ahead, names, remedy = config.asynchronous, f"mesh = {config.mesh.shape}", ", or --plan.mesh auto"
    train_size = size = math.prod(config.mesh.shape)
    if ahead.lag is not None:
        size += math.prod(ahead.rollout_mesh.shape)
        names, remedy = f"{names} and asynchronous.rollout_mesh = {ahead.rollout_mesh.shape}", ""
    count = plan.gpus or size
    if count % size:
        raise ConfigError(
            f"plan.gpus = {count}: must be a multiple of the {size} devices of {names}; nearest: "
            f"{nearest_multiples(count, size)}{remedy}"
        )
    times, devices = count // size, planned_devices(plan, count)
    train_devices, rollout_devices = devices[: train_size * times], devices[train_size * times :]
    config = replace(config, mesh=replace(config.mesh, data=config.mesh.data * times))
    mesh = mesh_over(train_devices, config.mesh)
    if ahead.lag is None:
        return config, mesh, mesh
    rollout_config = replace(ahead.rollout_mesh, data=ahead.rollout_mesh.data * times)
    rollout_mesh = mesh_over(rollout_devices, rollout_config)
    with as_config_error():
        check_sizes(mesh, rollout_mesh)
    return replace(config, asynchronous=replace(ahead, rollout_mesh=rollout_config)), mesh, rollout_mesh


def planned_devices(plan: PlanConfig, count: int) -> list[Any]:
    """Return `count` devices of the plan's kind. Raises ConfigError if jax's CUDA plugin is missing."""
    return _cpu_devices(count) if plan.gpu == "cpu" else absent_gpus(plan.gpu, count, plan.per_host)


def hardware_of(plan: PlanConfig, count: int) -> Hardware:
    """Return the sheet of the plan's devices, of which `count` are used."""
    hardware = HARDWARE[plan.gpu]
    if plan.gpu == "cpu":  # of one machine
        hardware = replace(hardware, per_host=count, domain=count)
    if plan.per_host is not None:
        hardware = replace(hardware, per_host=plan.per_host, domain=min(plan.per_host, hardware.domain))
    return replace(hardware, per_host=min(count, hardware.per_host))


def mesh_over(devices: Sequence[Any], config: MeshConfig) -> Mesh:
    """Return a mesh over these devices, which may be absent."""
    axes = (AxisType.Auto,) * len(AXES)
    return Mesh(np.reshape(np.array(devices), config.shape), AXES, axis_types=axes)


def absent_gpus(name: str, count: int = 1, per_host: int | None = None) -> list[Any]:
    """Return devices to compile for. name: of a sheet with a chip. Raises ConfigError without jax's CUDA plugin."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        raise ConfigError(
            f"plan.gpu = {name}: needs jax's CUDA plugin (pip install -e '.[cuda]' in a clone); without it, "
            "--plan.gpu cpu compiles for CPUs, which need 2.5 to 3 times a GPU's temporary memory"
        )
    gpu = HARDWARE[name]
    if per_host is not None and count % min(count, per_host):
        raise ConfigError(
            f"plan.per_host = {per_host}: must divide plan.gpus = {count}; nearest: {nearest_divisors(per_host, count)}"
        )
    per_host = min(count, per_host or gpu.per_host)
    # Without CUDA's libraries and a driver, the plugin can compile, but cannot start as a backend.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")
    topology = f"1x{math.ceil(count / per_host)}x{per_host}"
    try:
        description = topologies.get_topology_desc(platform="cuda", target_config=target(gpu), topology=topology)
    except jax.errors.JaxRuntimeError as error:
        raise RunStopped(
            f"jax's CUDA plugin cannot describe {gpu.name}: {first_line(error)}; it must have the version of jax, "
            f"{jax.__version__}"
        ) from error
    return list(description.devices)[:count]


def _cpu_devices(count: int) -> list[Any]:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices exist already
        pass
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"plan.gpus = {count}: must be at most {len(devices)}, the CPU devices that already exist")
    return devices[:count]
