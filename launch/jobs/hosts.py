"""Start the processes of a job over several hosts, before anything touches a device."""

import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import jax

from configs.override import flat
from configs.schema import HostsConfig, RunConfig
from launch.errors import ConfigError, RunStopped, first_line, one_line
from launch.jobs.failures import watch
from launch.jobs.rendezvous import wait_for_all
from launch.jobs.silence import limit_silence
from specjax.parallel import processes

# Longest allowed delay between the first and the last process to start.
START_WITHIN_S = 300
# Start of the line from which launch.supervise reads the names of the hosts.
HOSTS_LINE = "hosts: "


def join_hosts(config: RunConfig) -> RunConfig:
    """Connect the processes of the job, if there are several. Return the config without `hosts`.

    Drops the output, but not the errors, of all processes except the primary. Raises RunStopped if other processes are
    missing, and ConfigError if their options differ.
    """
    hosts, shared, arguments = config.hosts, replace(config, hosts=HostsConfig()), dict[str, Any]()
    if hosts.count > 1:
        arguments = {"coordinator_address": hosts.coordinator, "num_processes": hosts.count, "process_id": hosts.index}
        arguments |= {"cluster_detection_method": "deactivate"}
    # JAX's own handler would drop a SIGTERM that arrives before StopSignals is active.
    jax.config.update("jax_enable_preemption_service", False)
    if (arguments or launched_by_a_cluster(os.environ)) and not jax.distributed.is_initialized():
        if arguments:
            wait_for_all(hosts, START_WITHIN_S)
        try:
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=START_WITHIN_S,
                heartbeat_timeout_seconds=hosts.heartbeat,
                shutdown_timeout_seconds=hosts.heartbeat,
            )
        except Exception as error:  # JAX raises several types, with long messages
            raise RunStopped(f"hosts: the processes could not connect: {first_line(error)}") from error
        watch()
        limit_silence(hosts.silence)
        names, options = zip(*processes.gather((platform.node(), asdict(shared))), strict=True)
        shared = common(shared, options)
        host_list = ", ".join(f"{number} = {one_line(name)}" for number, name in enumerate(names))
        print(f"{HOSTS_LINE}{host_list}", file=sys.stderr, flush=True)
        if not processes.primary():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # Before a checkpoint is opened, which would create the devices.
    request_cpu_devices(shared)
    return shared


def request_cpu_devices(config: RunConfig) -> None:
    """Make JAX create as many CPU devices as the run uses, at most one per core, so that shards run in parallel.

    With several processes, each creates its part. Does nothing if XLA_FLAGS sets the number or JAX is already
    initialised. Does not affect other platforms.
    """
    ahead, count = config.asynchronous, math.prod(config.mesh.shape)
    if ahead.lag is not None:
        count += math.prod(ahead.rollout_mesh.shape)
    count = -(-count // processes.count())
    if count > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(count, os.cpu_count() or 1))


def common(config: RunConfig, options: Sequence[dict[str, Any]]) -> RunConfig:
    """Return this process's config with `resume` of process 0. Raises ConfigError if other options differ.

    `resume` may differ: launch.supervise sets it if a file exists, which a shared file system may show late.

    options: the configs of all processes, as dicts.
    """
    first, *others = map(flat, options)
    for number, each in enumerate(others, start=1):
        if differ := [name for name in first | each if name != "resume" and each.get(name) != first.get(name)]:
            shown = ", ".join(f"{name} = {each.get(name)}, in process 0 {first.get(name)}" for name in differ[:3])
            more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
            raise ConfigError(f"hosts.index = {number}: its options differ from those of process 0: {shown}{more}")
    return replace(config, resume=first["resume"])


def launched_by_a_cluster(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher that JAX detects has started several processes: Slurm, Open MPI or a Kubernetes Job.

    Within a Slurm allocation, only `srun` starts several processes.
    """
    if "SLURM_STEP_NODELIST" in environment:
        return int(environment.get("SLURM_NTASKS", 1)) > 1
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    in_a_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return in_a_job and find_spec("kubernetes") is not None  # JAX uses this package to ask the cluster
