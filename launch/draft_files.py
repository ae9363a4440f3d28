"""A draft as files by itself: in our format, or an EAGLE-3 head in a public dialect."""

from pathlib import Path

import numpy as np

from launch.build import Networks
from launch.errors import ConfigError
from models.config import DecoderConfig
from models.draft_checkpoint import SavedDraft, save_draft_checkpoint
from models.eagle3 import Eagle3Config
from models.eagle3_dialects import Described, Dialect, config_to_public
from models.eagle3_files import save_eagle3
from models.policy_checkpoint import save_policy_checkpoint
from specjax.types import PyTree


def check_draft(networks: Networks, kind: str, dialect: Dialect | None = None) -> None:
    """Raise ConfigError where the draft, `kind` by its configuration, cannot be written so by itself."""
    head = networks.head
    if not isinstance(head, Eagle3Config | DecoderConfig):
        raise ConfigError(f"draft.kind = {kind}: has no format to be saved in by itself")
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

    target_ids: as `SavedDraft` has them. verifier: the policy's name or path, for speculators' file to state.
    Raises ValueError where the directory is in use.
    """
    head, layers = networks.head, networks.decoder.feature_layers
    if isinstance(head, DecoderConfig):
        save_policy_checkpoint(directory, draft, head)
    elif isinstance(head, Eagle3Config) and dialect is None:
        save_draft_checkpoint(directory, draft, head, target_ids, layers)
    elif isinstance(head, Eagle3Config) and dialect is not None:
        save_eagle3(directory, SavedDraft(head, draft, target_ids, layers), dialect, verifier=verifier)
