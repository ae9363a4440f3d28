"""Sections of a run that accept your own function: rollout and loss."""

import re
from dataclasses import dataclass

from specjax.options import NonNegative
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
    """Generation of completions.

    Attributes:
        stop_tokens: More stop tokens: ids, or texts of one token each.
        stop_strings: Texts of any tokens that end a completion.
        replace_stop_tokens: End completions only at stop_tokens and stop_strings.
        function: Your own rollout function, as package.module:name. None: speculative_rollout.
    """

    # An experiment replaces texts by ids.
    stop_tokens: tuple[NonNegative | str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    replace_stop_tokens: bool = False
    function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("function", self.function)
        if self.replace_stop_tokens and not self.stop_tokens:
            raise ValueError("replace_stop_tokens = True: must be False without stop_tokens")
        if max(self.lengths) > self.max_new_tokens:
            name = "draft_lengths" if self.draft_lengths else "draft_length"
            value = getattr(self, name)
            raise ValueError(f"{name} = {value}: must be at most max_new_tokens = {self.max_new_tokens}")


@dataclass(frozen=True)
class LossOptions(LossConfig):
    """The policy's loss.

    Attributes:
        function: Your own loss, as package.module:name. None: policy_loss.
    """

    function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("function", self.function)
