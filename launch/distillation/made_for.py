"""What the programs that write a draft state of it."""

from launch.distillation.acceptance import Acceptance
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig


def of_distillation(policy: str | None, decoder: DecoderConfig, measured: Acceptance) -> MadeFor:
    """Of a draft distilled from `policy`, the directory of one or of a run, as it was measured afterwards."""
    # At temperature 0 a run measures another acceptance than is measured here, one of the laws at temperature 1.
    predicted = measured.predicted if measured.temperature > 0 else None
    return MadeFor(policy, decoder.hidden_size, decoder.num_layers, measured.temperature, predicted)
