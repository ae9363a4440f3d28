"""Section of a run that describes its teacher."""

from dataclasses import dataclass

from specjax.train.teacher import TeacherConfig
from specjax.types import EightBit


@dataclass(frozen=True)
class TeacherOptions(TeacherConfig):
    """On-policy distillation: the policy learns from a teacher at every token that it draws.

    Attributes:
        path:         Directory of the teacher in Hugging Face layout, or its name on the hub; then kind is network.
        weight_dtype: int8 or fp8: kernels of the teacher in 8 bits. None: model.dtype.
        hint_text:    How a hint stands at the end of the teacher's question; {hint} is the hint.
    """

    path: str | None = None
    weight_dtype: EightBit | None = None
    hint_text: str = "\n\nA correct solution:\n{hint}\n\nNow answer in your own words."

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) != (self.kind == "network"):
            raise ValueError(f"path = {self.path}: must be given with kind network, otherwise None")
        if self.weight_dtype is not None and self.kind != "network":
            raise ValueError(f"weight_dtype = {self.weight_dtype}: must be None with kind {self.kind}")
        if self.hint_text.count("{hint}") != 1:
            raise ValueError(f"hint_text = {self.hint_text!r}: must have {{hint}} once")
