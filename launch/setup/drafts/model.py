"""Construction of a small draft model with the vocabulary of the policy."""

from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import ConfigError
from launch.setup.drafts.base import Draft, DraftContext, PublicLayout
from launch.setup.policy import build_decoder, check_exportable, longest_sequence
from models.config import DecoderConfig
from models.decoder import make_policy
from models.hf.drafts.dialects import Dialect
from models.hf.save import save_policy
from models.sheets import decoder_sheet
from specjax.cost import DraftSheet
from specjax.drafters import ModelDrafter
from specjax.types import PyTree


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelDraft(Draft):
    """A small language model as the draft. decoder: config of this model."""

    decoder: DecoderConfig

    @property
    def sheet(self) -> DraftSheet:
        return DraftSheet(decoder_sheet(self.decoder))

    def check_writable(self, dialect: Dialect | None = None) -> None:
        super().check_writable(dialect)
        check_exportable(self.decoder, f"draft.kind = {self.kind}: its network")

    def write(self, directory: Path, params: PyTree, layout: PublicLayout | None = None) -> None:
        save_policy(directory, params, self.decoder)


def build_model(context: DraftContext) -> Draft:
    """Return the draft model of draft.path, or of draft.architecture with random weights.

    Raises ConfigError if its vocabulary differs from the policy's or it cannot reach the longest sequence.
    """
    config, draft = context.config, context.config.draft
    model = replace(config.model, path=draft.path, architecture=draft.architecture, feature_layers=())
    longest = longest_sequence(config)
    decoder, params = build_decoder(model, context.mesh, context.key, "draft", longest, features=None)
    if decoder.vocab_size != context.policy.vocab_size:
        raise ConfigError(
            f"draft.kind = model: its vocab_size is {decoder.vocab_size}; must be {context.policy.vocab_size}, the "
            "policy's"
        )
    decoder = replace(decoder, feature_layers=())
    read_from = None if draft.path is None else "draft.path"
    drafter = ModelDrafter(replace(make_policy(decoder), eight_bit=draft.rollout_dtype), draft.loss)
    return ModelDraft(drafter=drafter, params=params, decoder=decoder, read_from=read_from)
