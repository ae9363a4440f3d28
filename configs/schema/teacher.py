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
    """

    path: str | None = None
    weight_dtype: EightBit | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) != (self.kind == "network"):
            raise ValueError(f"path = {self.path}: must be given with kind network, otherwise None")
        if self.weight_dtype is not None and self.kind != "network":
            raise ValueError(f"weight_dtype = {self.weight_dtype}: must be None with kind {self.kind}")
