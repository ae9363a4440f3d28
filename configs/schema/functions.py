"""The sections of a run in which a function of one's own can take the place of a built-in one."""

import re
from dataclasses import dataclass

from specjax.rollout.plan import RolloutConfig
from specjax.train.loss import LossConfig

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_function(text: str) -> bool:
    """Return whether `text` has the form of a function's name, `package.module:name`."""
    return _FUNCTION.fullmatch(text) is not None


def check_function(name: str, value: str | None) -> None:
    """Raise ValueError unless the option `name` is None or has the form `package.module:name`."""
    if value is not None and not is_function(value):
        raise ValueError(f"{name} = {value}: must be None or a function, package.module:name")


@dataclass(frozen=True)
class RolloutOptions(RolloutConfig):
    """How completions are generated.

    Attributes:
        function: Rollout function in place of speculative_rollout, as package.module:name.
    """

    function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("function", self.function)


@dataclass(frozen=True)
class LossOptions(LossConfig):
    """The policy's loss.

    Attributes:
        function: Loss function in place of policy_loss, as package.module:name.
    """

    function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("function", self.function)
