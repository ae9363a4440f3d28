"""The processes of a job over several hosts."""

from dataclasses import dataclass

from specjax.options import NonNegative, Options, Positive


@dataclass(frozen=True)
class HostsConfig(Options):
    """Processes of a job, for launchers that JAX does not know. It finds those of Slurm, Open MPI and Kubernetes.

    Attributes:
        coordinator: Address of process 0, as HOST:PORT. The port must be free there.
        count:       Number of processes.
        index:       Number of this process, from 0.
        heartbeat:   Seconds without a sign of life after which a process counts as dead, and all others end.
    """

    coordinator: str | None = None
    count: Positive = 1
    index: NonNegative = 0
    heartbeat: Positive = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= self.count:
            raise ValueError(f"index = {self.index}: must be below count = {self.count}")
        if self.count > 1 and not (self.coordinator or "").rpartition(":")[2].isdecimal():
            raise ValueError(f"coordinator = {self.coordinator}: must be HOST:PORT of process 0 where count > 1")
