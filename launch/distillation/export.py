"""Write what was trained as files that others load: a draft by itself, or a policy with its MTP head."""

from pathlib import Path

from launch.build.conversion import public_config
from launch.build.drafts.base import Draft
from launch.build.experiment import Experiment
from launch.build.networks import Networks
from launch.cli.errors import ConfigError
from launch.data.tokenizers import copy_tokenizer
from launch.distillation.acceptance import HeldOutAcceptance
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.hf.config import config_to_hf
from models.hf.eagle3_dialects import Dialect
from models.hf.mtp_files import MTPHead
from models.hf.save import save_policy
from specjax.types import Params, PyTree

DRAFT, POLICY = "draft", "policy"


def check_verifier(verifier: str | None, dialect: str) -> None:
    """Raise ConfigError where a name of the policy is given that no file would state."""
    if verifier is not None and dialect != "speculators":
        raise ConfigError(f"verifier = {verifier}: for dialect speculators alone")


def check_trained(networks: Networks, dialect: Dialect | None) -> None:
    """Raise ConfigError where what a distillation trains cannot be written: a draft, or a policy with an MTP head."""
    draft = networks.draft
    if not draft.in_policy:
        draft.check_writable(dialect)
        return
    if dialect is not None:
        raise ConfigError(f"dialect = {dialect}: for an EAGLE-3 head alone, draft.kind is {draft.kind}")
    assert networks.decoder is not None
    try:
        config_to_hf(networks.decoder)
    except ValueError as error:
        raise ConfigError(f"draft.kind = {draft.kind}: its policy cannot be written: {error}") from error


def write_trained(
    out: Path, experiment: Experiment, draft: Draft, params: Params, dialect: Dialect | None, verifier: str | None
) -> list[Path]:
    """Write the draft, also in `dialect`, or the policy with an MTP head; return the directories, all new in `out`."""
    if draft.in_policy:
        write_policy(out / POLICY, experiment, params.policy, draft.policy_head(params.draft))
        return [out / POLICY]
    draft.write(out / DRAFT, params.draft)
    if dialect is None:
        return [out / DRAFT]
    draft.write(out / dialect, params.draft, dialect, verifier)
    return [out / DRAFT, out / dialect]


def write_policy(directory: Path, experiment: Experiment, policy: PyTree, mtp: MTPHead | None) -> None:
    """Write a policy of the run in Hugging Face's layout, with its tokenizer.

    Fields in the config.json of model.path that the network's shape does not say are kept.

    mtp: a head to stitch in under the names of its family.
    Raises ValueError if the directory is in use, or Hugging Face knows no family of the policy's kind.
    """
    model, decoder = experiment.config.model, experiment.networks.decoder
    if decoder is None:
        raise ConfigError(f"model.family = {model.family}: has no layout of Hugging Face's, must be a built-in family")
    fields = None if model.path is None else public_config(Path(model.path))
    save_policy(directory, policy, decoder, fields, mtp=mtp)
    if model.path is not None:
        copy_tokenizer(Path(model.path), directory)


def made_for_distillation(
    policy: str | None, decoder: DecoderConfig | None, measured: HeldOutAcceptance
) -> MadeFor | None:
    """Return what a draft was made for that was distilled from `policy`, the directory of one or of a run.

    decoder: shape of the policy. None, that of a family of one's own, is nothing that a file could state.
    """
    if decoder is None:
        return None
    # At temperature 0 a run measures another acceptance than is measured here, that of the laws at temperature 1.
    predicted = measured.predicted if measured.temperature > 0 else None
    return MadeFor(policy, decoder.hidden_size, decoder.num_layers, measured.temperature, predicted)
