"""Section of a run that describes what answers between the turns of a completion."""

from dataclasses import dataclass
from typing import Annotated

from configs.schema.functions import is_function
from specjax.options import Options, Positive, above, at_most

# The name of a function that was passed to `launch.trainer.train` begins so.
LOCAL = "python:"
CALL_FORMATS = "hermes", "qwen3_coder", "llama3", "mistral"
Seconds = Annotated[float, above(0), at_most(86_400)]


@dataclass(frozen=True)
class EnvironmentConfig(Options):
    """Environment that answers between the turns of a completion. Without function and tools there is one turn.

    Attributes:
        function:  Your own environment, as package.module:name: a class with step(turn), or an environment in JAX.
        tools:     Functions that the model may call, as package.module:name. A turn without a call ends the completion.
        calls:     How the model writes calls: hermes, qwen3_coder, llama3 or mistral. None: as its chat template shows.
        answer_tokens: Most tokens of an answer, with what the chat template writes around it. Longer texts are cut.
        call_limit_s: Seconds for one answer. After that the completion has no reward.
        episode_limit_s: Seconds for all answers of a completion together.
    """

    function: str | None = None
    tools: tuple[str, ...] = ()
    calls: str | None = None
    answer_tokens: Positive = 256
    call_limit_s: Seconds = 10.0
    episode_limit_s: Seconds = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("function", self.function), *(("tools", tool) for tool in self.tools)):
            if value is not None and not is_function(value) and not value.startswith(LOCAL):
                raise ValueError(f"{name} = {value}: must be package.module:name")
        if self.function is not None and self.tools:
            raise ValueError(f"tools = {self.tools}: must be empty with function = {self.function}")
        if self.calls is not None and self.calls not in CALL_FORMATS:
            raise ValueError(f"calls = {self.calls}: must be one of {', '.join(CALL_FORMATS)}, or None")
        if self.calls is not None and not self.tools:
            raise ValueError(f"calls = {self.calls}: must be None without tools")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the functions; () without an environment."""
        return self.tools if self.function is None else (self.function,)
