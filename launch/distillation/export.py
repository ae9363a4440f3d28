"""What was trained as files that others load: a draft by itself, or a policy with its MTP head stitched in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.build.networks import Networks
from launch.cli.errors import ConfigError
from launch.data.tokenizers import copy_tokenizer
from models.checkpoints.draft import SavedDraft, save_draft_checkpoint
from models.checkpoints.policy import save_policy_checkpoint
from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import MTPConfig
from models.files import CARRIED, read_json
from models.hf.config import carried_fields, config_to_hf
from models.hf.eagle3_dialects import Described, Dialect, config_to_public
from models.hf.eagle3_files import save_eagle3
from models.hf.mtp_files import MTPHead
from models.hf.save import save_policy
from specjax.types import PyTree


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


def write_policy(
    directory: Path, decoder: DecoderConfig, policy: PyTree, source: str | None, mtp: MTPHead | None
) -> None:
    """Write a policy in Hugging Face's layout, with its tokenizer.

    source: the directory that the run's policy came from, of which all is kept that the network's shape does not say.
    mtp: a head to stitch in under the names of its family.
    Raises ValueError where the directory is in use, or no family is of the policy's kind.
    """
    save_policy(directory, policy, decoder, _carried(source), mtp=mtp)
    if source is not None:
        copy_tokenizer(Path(source), directory)


def _carried(source: str | None) -> dict[str, Any] | None:
    """Of the policy that a run started from, what its own config.json has beside the network's shape."""
    if source is None:
        return None
    directory = Path(source)
    if (directory / "params").is_dir():
        return read_json(directory / CARRIED) if (directory / CARRIED).exists() else None
    return carried_fields(read_json(directory / "config.json"))
