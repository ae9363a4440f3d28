"""Construction of EAGLE-3 heads, from a checkpoint or with random weights."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch.setup.drafts.base import (
    Draft,
    DraftContext,
    FeatureDraft,
    PublicLayout,
    own_vocabulary,
    param_dtype,
    with_options,
)
from launch.setup.drafts.saved_head import fit_head
from launch.setup.policy import random_params
from models.checkpoints.draft import SavedDraft, save_draft_checkpoint
from models.config import DecoderConfig, eagle3_feature_layers
from models.drafts.eagle3 import Eagle3Config, eagle3_like, init_eagle3, make_eagle3
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.stated_policy import stated_policy
from models.hf.drafts.writer import draft_to_public, save_public_draft
from models.sheets import eagle3_sheet
from specjax.cost import DraftSheet
from specjax.types import PyTree

# Options of a head that only block drafts have.
ONLY_BLOCKS = ("block_size", "markov_rank")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Eagle3Draft(FeatureDraft):
    """An EAGLE-3 head, which reads features of the policy."""

    head: Eagle3Config

    dialects = ("specforge", "speculators")

    def differences(self) -> str | None:
        if self.read_from is None:
            return None
        head, policy, made_for = self.head, self.decoder, self.made_for
        # EAGLE-3's three layers are distinct only in a policy of at least 7 layers.
        usual_layers = eagle3_feature_layers(policy.num_layers) if policy.num_layers >= 7 else policy.feature_layers
        shared = ("rope_theta", "rope_scaling", "max_positions")
        # (name, the draft's value, the expected value, whose value that is)
        compared = [(name, getattr(head, name), getattr(policy, name), "the policy's") for name in shared]
        if head.use_aux_hidden_state:
            compared.append(("feature_layers", policy.feature_layers, usual_layers, "EAGLE-3's"))
        if made_for is not None:
            compared.append(("a policy of num_layers", made_for.num_layers, policy.num_layers, "this policy's"))
        differing = [
            f"{name} = {value} ({whose}: {expected})" for name, value, expected, whose in compared if value != expected
        ]
        if not differing:
            return None
        line = f"the draft of draft.path was made with {', '.join(differing)}"
        if head.max_positions < policy.max_positions:
            line += f"; acceptance may fall beyond {head.max_positions} positions"
        return line

    @property
    def sheet(self) -> DraftSheet:
        return eagle3_sheet(self.head)

    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        return draft_to_public(self.head, self.decoder.feature_layers, dialect)

    def write(self, directory: Path, params: PyTree, layout: PublicLayout | None = None) -> None:
        # Some engines end the rotary embedding at the head's max_positions, and would reject all drafts beyond it.
        head = replace(self.head, max_positions=self.decoder.max_positions, param_dtype=param_dtype(params))
        if layout is None:
            save_draft_checkpoint(directory, params, head, self.target_ids, self.decoder.feature_layers)
        else:
            saved = SavedDraft(head, params, self.target_ids, self.decoder.feature_layers)
            save_public_draft(directory, saved, layout.dialect, stated_policy(self.decoder, layout.verifier))


def build_eagle3(context: DraftContext) -> Draft:
    """Return the EAGLE-3 head of draft.path, or one with random weights.

    Raises ValueError if the head does not fit the policy.
    """
    draft, policy, decoder = context.config.draft, context.policy, context.decoder
    assert decoder is not None
    if context.saved is None:
        head = fresh_head(context, decoder)
    else:
        weights = None if context.key is None else context.weights
        head = fit_head(context.saved, context.config, decoder, weights)
    return Eagle3Draft(
        drafter=with_options(make_eagle3(head.config, policy, head.target_ids), draft),
        params=head.params,
        head=head.config,
        decoder=decoder,
        read_from=None if context.saved is None else "draft.path",
    )


def fresh_head(context: DraftContext, policy: DecoderConfig) -> SavedDraft:
    """Return a head with random weights. Sizes that the draft section does not set are the policy's."""
    draft = context.config.draft
    sizes = {name: getattr(draft, name) for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")}
    given = asdict(draft.head) | sizes
    changes = {name: value for name, value in given.items() if value is not None and name not in ONLY_BLOCKS}
    if not draft.head.use_aux_hidden_state:
        changes["feature_size"] = policy.hidden_size
    head = eagle3_like(policy, draft.vocab_size or policy.vocab_size, **changes)
    head.check(policy)
    params = random_params(partial(init_eagle3, head), context.key, context.mesh)
    return SavedDraft(head, params, own_vocabulary(context, policy.vocab_size), policy.feature_layers)
