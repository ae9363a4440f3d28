"""Rollouts on devices of their own."""

from dataclasses import dataclass, field

from specjax.options import NonNegative, Options
from specjax.parallel.mesh import MeshConfig


@dataclass(frozen=True)
class AsynchronousConfig(Options):
    """Rollouts on devices of their own, generated while earlier ones train (specjax.asynchronous).

    Attributes:
        lag:          Updates between the networks that generate a rollout and those that it trains. None: rollouts and
                      training take turns on one mesh.
        rollout_mesh: Devices for rollouts, beside those of `mesh`; a multiple or a divisor of their number.
    """

    lag: NonNegative | None = None
    rollout_mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag is None and self.rollout_mesh != MeshConfig():
            raise ValueError(f"rollout_mesh = {self.rollout_mesh.shape}: must be left out without asynchronous.lag")
