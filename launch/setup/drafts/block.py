"""Construction of block drafts, DFlash and DSpark, from a checkpoint or with random weights."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import DraftConfig
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from launch.setup.drafts.base import Draft, DraftContext, FeatureDraft, PublicLayout, own_vocabulary, param_dtype
from launch.setup.drafts.saved_head import fit_head
from launch.setup.policy import random_params
from models.checkpoints.draft import SavedDraft, save_draft_checkpoint
from models.config import DecoderConfig
from models.drafts.block import BlockConfig, block_like, init_block, make_block
from models.hf.drafts.carried import copies, policy_tables
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.stated_policy import stated_policy
from models.hf.drafts.writer import draft_to_public, save_public_draft
from models.sheets import block_sheet
from specjax.cost import DraftSheet
from specjax.types import PyTree


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockDraft(FeatureDraft):
    """A block draft, which reads features of the policy."""

    head: BlockConfig

    dialects = ("zlab", "speculators", "deepspec")

    @property
    def sheet(self) -> DraftSheet:
        return block_sheet(self.head)

    def differences(self) -> str | None:
        if self.read_from is None:
            return None
        shared = ("rope_theta", "rope_scaling", "max_positions")
        compared = [(name, getattr(self.head, name), getattr(self.decoder, name)) for name in shared]
        if (made_for := self.made_for) is not None:
            compared.append(("a policy of num_layers", made_for.num_layers, self.decoder.num_layers))
        differing = [f"{name} = {own} (the policy's: {other})" for name, own, other in compared if own != other]
        return f"the draft of draft.path was made with {', '.join(differing)}" if differing else None

    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        return draft_to_public(self.head, self.decoder.feature_layers, dialect, stated_policy(self.decoder))

    def write(self, directory: Path, params: PyTree, layout: PublicLayout | None = None) -> None:
        head = replace(self.head, param_dtype=param_dtype(params))
        if layout is None:
            save_draft_checkpoint(directory, params, head, self.target_ids, self.decoder.feature_layers)
        else:
            saved = SavedDraft(head, params, self.target_ids, self.decoder.feature_layers)
            tables = None
            if layout.dialect == "deepspec":
                tables = copies(policy_tables(self.decoder, layout.policy), head.param_dtype)
            save_public_draft(
                directory, saved, layout.dialect, stated_policy(self.decoder, layout.verifier), carried=tables
            )


def build_block(context: DraftContext) -> Draft:
    """Return the block draft of draft.path, or one with random weights.

    Raises ValueError if the draft does not fit the policy, and ConfigError if it drafts fewer tokens than the run asks.
    """
    config, decoder = context.config, context.decoder
    draft = config.draft
    assert decoder is not None
    if context.saved is None:
        head = fresh_block(draft, decoder, context.tokenizer)
        params = random_params(partial(init_block, head), context.key, context.mesh)
        ids = own_vocabulary(context, decoder.vocab_size)
    else:
        weights = None if context.key is None else context.weights
        head, params, ids, _ = fit_head(context.saved, config, decoder, weights)
        assert isinstance(head, BlockConfig)
    for name in ("draft_length", "draft_lengths"):
        # Evaluation and generation draft at `draft_length`, whatever rollouts choose from.
        if np.max(lengths := getattr(config.rollout, name), initial=0) > head.block_size:
            raise ConfigError(f"rollout.{name} = {lengths}: must be at most {head.block_size}, the draft's block_size")
    drafter = make_block(head, context.policy, ids)
    drafter = replace(
        drafter,
        head=replace(drafter.head, eight_bit=draft.rollout_dtype),
        decay=draft.decay,
        objective=draft.loss,
    )
    read_from = None if context.saved is None else "draft.path"
    return BlockDraft(drafter=drafter, params=params, head=head, decoder=decoder, read_from=read_from)


def fresh_block(draft: DraftConfig, policy: DecoderConfig, tokenizer: Tokenizer) -> BlockConfig:
    """Return the shape of a block draft with random weights. Sizes that the section does not set are the policy's.

    The mask is a row of the policy's embedding, as in public layouts: the first after the tokenizer's, or else that of
    its first stop token, with which no block of a completion begins.
    """
    options = draft.head
    sizes = {name: getattr(draft, name) for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")}
    sizes |= {"num_layers": options.num_layers, "sliding_window": options.sliding_window}
    sizes["draft_vocab_size"] = draft.vocab_size
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    unused = tokenizer.vocab_size < policy.vocab_size
    changes["mask_token_id"] = tokenizer.vocab_size if unused else tokenizer.stop_tokens[0]
    if draft.kind == "dspark":
        changes |= dict(markov_rank=options.markov_rank, enable_confidence_head=True, confidence_head_with_markov=True)
    head = block_like(policy, options.block_size, sample_from_anchor=draft.kind == "dspark", **changes)
    head.check(policy)
    return head
