"""The options of launch.plan."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from launch.cli.paths import check_writable
from specjax.options import Options, at_least, at_most

Count = Annotated[int, at_least(1), at_most(2**16)]


@dataclass(frozen=True)
class PlanConfig(Options):
    """GPUs to compile the step for.

    Attributes:
        gpu:          Kind of GPU. cpu: compile for CPUs, which need 2.5 to 3 times a GPU's temporary memory.
        gpus:         Number of GPUs, a multiple of the mesh's size; mesh.data grows to use them. None: the mesh's size.
                      With asynchronous.lag the size is that of both meshes, and data of both grows.
        mesh:         recipe: the recipe's. auto: choose one for the number of GPUs, by memory and by the cost model;
                      not with asynchronous.lag.
        per_host:     GPUs per host. None: 4 for gb200, otherwise 8.
        alternatives: If the step does not fit, also compile it with one option changed at a time, and compare.
    """

    gpu: Literal["h100", "h200", "b200", "gb200", "cpu"] = "h100"
    gpus: Count | None = None
    mesh: Literal["recipe", "auto"] = "recipe"
    per_host: Count | None = None
    alternatives: bool = True


@dataclass(frozen=True)
class PlanArgs(Options):
    """Options that only launch.plan has.

    Attributes:
        json: File for the results.
        plan: GPUs to compile the step for.
    """

    json: str | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable("json", self.json)
