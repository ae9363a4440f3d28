"""Write what was trained as files that others load: a draft by itself, or a policy with its MTP head."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from launch.build.conversion import public_config
from launch.build.experiment import Experiment
from launch.build.networks import Networks
from launch.cli.errors import ConfigError
from launch.data.tokenizers import copy_tokenizer
from launch.distillation.acceptance import HeldOutAcceptance
from models.checkpoints.draft import SavedDraft, save_draft_checkpoint
from models.checkpoints.made_for import MadeFor
from models.checkpoints.policy import save_policy_checkpoint
from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import MTPConfig
from models.hf.config import config_to_hf
from models.hf.eagle3_dialects import Described, Dialect, config_to_public
from models.hf.eagle3_files import save_eagle3
from models.hf.mtp_files import MTPHead
from models.hf.save import save_policy
from specjax.types import Params, PyTree

DRAFT, POLICY = "draft", "policy"


def check_draft(networks: Networks, kind: str, dialect: Dialect | None = None) -> None:
    """Raise ConfigError where the draft, `kind` by its configuration, cannot be written so by itself."""
    head = networks.head
    if not isinstance(head, Eagle3Config | DecoderConfig):
        raise ConfigError(
            f"draft.kind = {kind}: has no format to be saved in by itself, an MTP head is saved with its policy"
        )
    if dialect is None:
        return
    if not isinstance(head, Eagle3Config):
        raise ConfigError(f"dialect = {dialect}: for an EAGLE-3 head alone, draft.kind is {kind}")
    try:
        config_to_public(Described(head, networks.decoder.feature_layers), dialect)
    except ValueError as error:
        raise ConfigError(f"dialect = {dialect}: {error}") from error


def write_draft(
    directory: Path,
    networks: Networks,
    draft: PyTree,
    target_ids: np.ndarray | None,
    dialect: Dialect | None = None,
    verifier: str | None = None,
) -> None:
    """Write the parameters `draft` of the networks' draft, in our format or in `dialect`; `check_draft` let it pass.

    target_ids: as `SavedDraft` has them. verifier: the policy's name as a serving engine knows it, or its path, for
    speculators' file to state beside its family. A head is written with the policy's length.
    Raises ValueError where the directory is in use.
    """
    head, layers = networks.head, networks.decoder.feature_layers
    if isinstance(head, Eagle3Config):
        # Some engines end the rotary embedding where the head says that it ends: there all drafts would be in vain.
        head = replace(head, max_positions=networks.decoder.max_positions)
    if isinstance(head, DecoderConfig):
        save_policy_checkpoint(directory, draft, head)
    elif isinstance(head, Eagle3Config) and dialect is None:
        save_draft_checkpoint(directory, draft, head, target_ids, layers)
    elif isinstance(head, Eagle3Config) and dialect is not None:
        saved = SavedDraft(head, draft, target_ids, layers)
        save_eagle3(directory, saved, dialect, verifier=verifier, policy=networks.decoder)


def check_verifier(verifier: str | None, dialect: str) -> None:
    """Raise ConfigError where a name of the policy is given that no file would state."""
    if verifier is not None and dialect != "speculators":
        raise ConfigError(f"verifier = {verifier}: for dialect speculators alone")


def check_trained(networks: Networks, kind: str, dialect: Dialect | None) -> None:
    """Raise ConfigError where what a distillation trains cannot be written: a draft, or a policy with an MTP head."""
    if not isinstance(networks.head, MTPConfig):
        check_draft(networks, kind, dialect)
        return
    if dialect is not None:
        raise ConfigError(f"dialect = {dialect}: for an EAGLE-3 head alone, draft.kind is {kind}")
    try:
        config_to_hf(networks.decoder)
    except ValueError as error:
        raise ConfigError(f"draft.kind = {kind}: its policy cannot be written: {error}") from error


def write_trained(
    out: Path,
    experiment: Experiment,
    params: Params,
    target_ids: np.ndarray | None,
    dialect: Dialect | None,
    verifier: str | None,
) -> list[Path]:
    """Write the draft, also in `dialect`, or the policy with an MTP head; return the directories, all new in `out`."""
    networks = experiment.networks
    if isinstance(networks.head, MTPConfig):
        head = networks.head, params.draft
        write_policy(out / POLICY, networks.decoder, params.policy, experiment.config.model.path, head)
        return [out / POLICY]
    write_draft(out / DRAFT, networks, params.draft, target_ids)
    if dialect is None:
        return [out / DRAFT]
    write_draft(out / dialect, networks, params.draft, target_ids, dialect, verifier)
    return [out / DRAFT, out / dialect]


def write_policy(
    directory: Path, decoder: DecoderConfig, policy: PyTree, source: str | None, mtp: MTPHead | None
) -> None:
    """Write a policy in Hugging Face's layout, with its tokenizer.

    source: the directory that the run's policy came from; fields of its config.json that the network's shape does not
            say are kept.
    mtp:    a head to stitch in under the names of its family.
    Raises ValueError if the directory is in use, or no family is of the policy's kind.
    """
    directory_of_source = None if source is None else Path(source)
    fields = None if directory_of_source is None else public_config(directory_of_source)
    save_policy(directory, policy, decoder, fields, mtp=mtp)
    if directory_of_source is not None:
        copy_tokenizer(directory_of_source, directory)


def made_for_distillation(policy: str | None, decoder: DecoderConfig, measured: HeldOutAcceptance) -> MadeFor:
    """Return what a draft was made for that was distilled from `policy`, the directory of one or of a run."""
    # At temperature 0 a run measures another acceptance than is measured here, that of the laws at temperature 1.
    predicted = measured.predicted if measured.temperature > 0 else None
    return MadeFor(policy, decoder.hidden_size, decoder.num_layers, measured.temperature, predicted)
