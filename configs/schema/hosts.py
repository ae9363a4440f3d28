"""The processes of a job over several hosts."""

import re
from dataclasses import dataclass
from typing import Annotated

from specjax.options import NonNegative, Options, Positive, at_least, at_most

# A name, an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-f:.]+\]):(\d{1,5})", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class HostsConfig(Options):
    """Processes of a job, for launchers that JAX does not know. It finds those of Slurm, Open MPI and Kubernetes.

    Attributes:
        coordinator: Address of process 0, as HOST:PORT. The port must be free there.
        count:       Number of processes.
        index:       Number of this process, from 0.
        heartbeat:   Seconds without a sign of life after which a process counts as dead, and all others end.
        silence:     Seconds in which some process must end a step or a part of a phase. Otherwise all end.
    """

    coordinator: str | None = None
    count: Annotated[int, at_least(1), at_most(2**16)] = 1
    index: NonNegative = 0
    heartbeat: Positive = 20
    silence: Positive = 7200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= self.count:
            raise ValueError(f"index = {self.index}: must be below count = {self.count}")
        if self.coordinator is None:
            if self.count > 1:
                raise ValueError(f"coordinator = None: must be HOST:PORT of process 0 where count = {self.count}")
        elif not (found := _ADDRESS.fullmatch(self.coordinator)) or not 0 < int(found[1]) < 2**16:
            raise ValueError(f"coordinator = {self.coordinator}: must be HOST:PORT, with a port of 1 to 65535")
