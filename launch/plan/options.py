"""The options of launch.plan."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from launch.cli.paths import check_writable
from specjax.options import Options, at_least, at_most

Count = Annotated[int, at_least(1), at_most(2**16)]


@dataclass(frozen=True)
class PlanConfig(Options):
    """GPUs that the step is compiled for.

    Attributes:
        gpu:          GPU to compile for. cpu: the CPU, whose temporaries are 2.5 to 3 times a GPU's.
        gpus:         Number of GPUs, a multiple of the mesh's, which is repeated along data. None: the mesh's.
        per_host:     GPUs of a host. None: as sold, 8, and 4 of gb200.
        alternatives: If the step does not fit, compile it with single options changed too, and compare.
    """

    gpu: Literal["h100", "h200", "b200", "gb200", "cpu"] = "h100"
    gpus: Count | None = None
    per_host: Count | None = None
    alternatives: bool = True


@dataclass(frozen=True)
class PlanArgs(Options):
    """Options of launch.plan alone.

    Attributes:
        json: File for the results.
        plan: GPUs that the step is compiled for.
    """

    json: str | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable("json", self.json)
