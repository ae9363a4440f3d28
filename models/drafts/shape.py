"""Shape of the drafts that read features of the policy, as far as all of them have it in common."""

from dataclasses import dataclass
from typing import Any

from models.config import DecoderConfig, LayerConfig, MaxPositions
from specjax.options import Positive


@dataclass(frozen=True, kw_only=True)
class FeatureDraftConfig(LayerConfig):
    """Shape of a draft on features. `hidden_size` and `vocab_size` are the policy's, whose embedding it borrows.

    Attributes:
        vocab_size: Size of the policy's vocabulary.
        draft_vocab_size: Size of the draft's vocabulary, at most `vocab_size`.
        feature_size: Width of the features that it reads.
        max_positions: Longest sequence that the rotary embedding was trained or made for.
        sliding_window: Number of last positions that it attends to; None for all.
    """

    vocab_size: Positive
    draft_vocab_size: Positive
    feature_size: Positive
    max_positions: MaxPositions = 32_768
    sliding_window: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size = {self.draft_vocab_size}: must be at most {self.vocab_size}")

    @property
    def reads_layers(self) -> bool:
        """Return whether it reads feature layers of the policy, and not its last hidden state."""
        return True

    @property
    def most_drafted(self) -> int | None:
        """Return the most tokens that it drafts in a round; None: any number."""
        return None

    def check(self, policy: DecoderConfig) -> None:
        """Raise ValueError, naming the field, if the draft does not fit the policy."""
        features = policy.hidden_size * (len(policy.feature_layers) if self.reads_layers else 1)
        sizes = {"hidden_size": policy.hidden_size, "feature_size": features, "vocab_size": policy.vocab_size}
        for name, size in sizes.items():
            if getattr(self, name) != size:
                raise ValueError(f"draft.{name} = {getattr(self, name)}: must be {size}, the policy's")


def sizes_of(policy: DecoderConfig, *, reads_layers: bool = True) -> dict[str, Any]:
    """Return the fields of a draft with the sizes and the whole vocabulary of its policy, and without biases."""
    fields: dict[str, Any] = policy.layer_options() | {"qkv_bias": False, "max_positions": policy.max_positions}
    fields |= {"vocab_size": policy.vocab_size, "draft_vocab_size": policy.vocab_size}
    return fields | {"feature_size": policy.hidden_size * (len(policy.feature_layers) if reads_layers else 1)}
