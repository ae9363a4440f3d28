"""Block drafts, DFlash and DSpark, from a checkpoint or with random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import DraftConfig
from launch.data.tokenizers import Tokenizer
from launch.setup.drafts.base import FeatureDraft, PublicLayout
from models.checkpoints.draft import SavedDraft
from models.config import DecoderConfig
from models.drafts.block import BlockConfig, block_like, make_block
from models.hf.drafts.carried import copies, policy_tables
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.stated_policy import stated_policy
from models.hf.drafts.writer import draft_to_public, save_public_draft
from models.sheets import block_sheet
from specjax.cost import DraftSheet


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockDraft(FeatureDraft):
    """A block draft, which reads features of the policy."""

    head: BlockConfig

    dialects = ("zlab", "speculators", "deepspec")
    make = staticmethod(make_block)

    @staticmethod
    def fresh(options: DraftConfig, policy: DecoderConfig, tokenizer: Tokenizer) -> BlockConfig:
        """Return the shape of a block draft with random weights. Sizes that the options do not set are the policy's.

        The mask is a row of the policy's embedding, as in public layouts: the first after the tokenizer's, or else that
        of its first stop token, with which no block of a completion begins.
        """
        unused = tokenizer.vocab_size < policy.vocab_size
        mask = tokenizer.vocab_size if unused else tokenizer.stop_tokens[0]
        return block_like(policy, mask_token_id=mask, **options.shape())

    @property
    def sheet(self) -> DraftSheet:
        return block_sheet(self.head)

    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        return draft_to_public(self.head, self.decoder.feature_layers, dialect, stated_policy(self.decoder))

    def publish(self, directory: Path, draft: SavedDraft, layout: PublicLayout) -> None:
        tables = None
        if layout.dialect == "deepspec":
            tables = copies(policy_tables(self.decoder, layout.policy), draft.config.param_dtype)
        verifier = stated_policy(self.decoder, layout.verifier)
        save_public_draft(directory, draft, layout.dialect, verifier, carried=tables)
