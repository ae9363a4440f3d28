"""Construction of MTP heads, from the policy's checkpoint or with random weights in a family's convention."""

from dataclasses import dataclass
from functools import partial

from launch.data.hub import checkpoint_directory
from launch.errors import ConfigError
from launch.setup.drafts.base import Draft, DraftContext, with_options
from launch.setup.policy import random_params
from models.drafts.mtp import CONVENTIONS, MTPConfig, init_mtp, make_mtp, mtp_config
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.mtp import MTPHead, load_mtp
from models.sheets import mtp_sheet
from specjax.cost import DraftSheet
from specjax.types import PyTree


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MTPDraft(Draft):
    """A multi-token-prediction (MTP) head: one more block after the policy's last. head: config of the head."""

    head: MTPConfig

    usual_causes = "the policy was trained without it, or with it but with another family's conventions"
    in_policy = True

    @property
    def policy_width(self) -> int:
        return self.head.hidden_size

    @property
    def sheet(self) -> DraftSheet:
        return mtp_sheet(self.head)

    def policy_head(self, params: PyTree) -> MTPHead:
        return self.head, params

    def check_writable(self, dialect: Dialect | None = None) -> None:
        raise ConfigError(f"draft.kind = {self.kind}: has no layout of its own; an MTP head is saved with its policy")


def build_mtp(context: DraftContext) -> Draft:
    """Return the MTP head of model.path, or with draft.mtp_convention one with random weights.

    Raises ConfigError if there is neither.
    """
    config, decoder, mesh = context.config, context.decoder, context.mesh
    path, convention = config.model.path, config.draft.mtp_convention
    assert decoder is not None
    if convention is not None:
        head, read_from = mtp_config(decoder, convention), None
        params = random_params(partial(init_mtp, head), context.key, mesh)
    elif context.key is None:
        raise ConfigError(f"draft.mtp_convention = None: must be {' or '.join(CONVENTIONS)} for a plan")
    else:
        source = None if path is None else checkpoint_directory("model.path", path)
        saved = None if source is None else load_mtp(source, decoder, mesh, config.model.param_dtype)
        if saved is None:
            allowed = " or ".join(CONVENTIONS)
            raise ConfigError(f"draft.mtp_convention = None: must be {allowed}; model.path = {path} holds no MTP head")
        (head, params), read_from = saved, "model.path"
    drafter = with_options(make_mtp(head, context.policy), config.draft)
    return MTPDraft(drafter=drafter, params=params, head=head, read_from=read_from)
