"""EAGLE-3 heads, from a checkpoint or with random weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import DraftConfig
from launch.data.tokenizers import Tokenizer
from launch.setup.drafts.base import FeatureDraft, PublicLayout
from models.checkpoints.draft import SavedDraft
from models.config import DecoderConfig, eagle3_feature_layers
from models.drafts.eagle3 import Eagle3Config, eagle3_like, make_eagle3
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.stated_policy import stated_policy
from models.hf.drafts.writer import draft_to_public, save_public_draft
from models.sheets import eagle3_sheet
from specjax.cost import DraftSheet


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Eagle3Draft(FeatureDraft):
    """An EAGLE-3 head, which reads features of the policy."""

    head: Eagle3Config

    dialects = ("specforge", "speculators")
    make = staticmethod(make_eagle3)

    @staticmethod
    def fresh(options: DraftConfig, policy: DecoderConfig, tokenizer: Tokenizer) -> Eagle3Config:
        return eagle3_like(policy, **options.shape())

    def layers_compared(self) -> list[tuple[str, Any, Any, str]]:
        layers, count = self.decoder.feature_layers, self.decoder.num_layers
        # EAGLE-3's three layers are distinct only in a policy of at least 7 layers.
        usual = eagle3_feature_layers(count) if count >= 7 else layers
        return [("feature_layers", layers, usual, "EAGLE-3's")] if self.head.reads_layers else []

    @property
    def sheet(self) -> DraftSheet:
        return eagle3_sheet(self.head)

    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        return draft_to_public(self.head, self.decoder.feature_layers, dialect)

    def written_head(self) -> Eagle3Config:
        # Some engines end the rotary embedding at the head's max_positions, and would reject all drafts beyond it.
        return replace(self.head, max_positions=self.decoder.max_positions)

    def publish(self, directory: Path, draft: SavedDraft, layout: PublicLayout) -> None:
        save_public_draft(directory, draft, layout.dialect, stated_policy(self.decoder, layout.verifier))
