"""Section of a run that describes its policy."""

from dataclasses import dataclass

from configs.schema.functions import check_function
from models.config import DecoderConfig, Dtype, Remat
from specjax.options import NonNegative, Options
from specjax.types import EightBit


@dataclass(frozen=True)
class ModelConfig(Options):
    """The policy.

    Attributes:
        path:           Directory in Hugging Face layout. None: random weights.
        family:         Builder of your own policy, as package.module:name. None: a built-in family, which the
                        checkpoint names.
        architecture:   Network with random weights; used if path is None.
        feature_layers: Layers whose input the draft reads, counted from 0. Empty: as the draft's checkpoint says,
                        else 2, L/2 and L-3 of L layers for EAGLE-3, five of them for a block draft; of a policy with
                        fewer, those that there are.
        dtype:          Dtype of the computation.
        param_dtype:    Dtype of the master weights.
        rollout_dtype:  int8 or fp8: the rollout samples from a copy with kernels in 8 bits, another law than the one
                        that is trained; loss.importance_cap corrects for it. None: dtype.
        remat:          Activations that the backward pass recomputes instead of keeping them in memory: none; dots, all
                        but the results of matmuls and of cuDNN's attention; full, all within a layer.
    """

    path: str | None = None
    family: str | None = None
    architecture: DecoderConfig | None = None
    feature_layers: tuple[NonNegative, ...] = ()
    dtype: Dtype = "bfloat16"
    param_dtype: Dtype = "float32"
    rollout_dtype: EightBit | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("family", self.family)
        if self.rollout_dtype is not None and self.family is not None:
            raise ValueError(f"rollout_dtype = {self.rollout_dtype}: must be None with a user's model family")
