"""Maps between a draft's reduced vocabulary and the policy's, in the files of SpecForge and speculators.

`d2t` [Vd] holds policy id - draft id, `t2d` [V] flags the policy's ids in use.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.checkpoints.draft import check_target_ids
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.files import errors_name

TO_TARGET, TO_DRAFT = "d2t", "t2d"


def read_target_ids(tensors: Mapping[str, np.ndarray], config: Eagle3Config | BlockConfig) -> np.ndarray | None:
    """Return the policy's id of each draft id; None without maps. tensors: the maps, and any others.

    Raises a one-line ValueError that names the map which is missing, or does not describe such a vocabulary.
    """
    offsets, in_draft = tensors.get(TO_TARGET), tensors.get(TO_DRAFT)
    if offsets is None:
        if in_draft is not None:
            raise ValueError(f"{TO_DRAFT}: must not be present without {TO_TARGET}")
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"{TO_TARGET}: missing; must be present for a draft_vocab_size of {config.draft_vocab_size} out of "
                f"{config.vocab_size}"
            )
        return None
    if offsets.shape != (config.draft_vocab_size,) or not np.issubdtype(offsets.dtype, np.integer):
        expected = f"int64 ({config.draft_vocab_size},)"
        raise ValueError(f"{TO_TARGET}: is {offsets.dtype} {offsets.shape}; must be {expected}")
    ids = np.arange(len(offsets)) + offsets
    with errors_name(Path(TO_TARGET)):
        check_target_ids(ids, config)
    flagged = in_draft is not None and in_draft.shape == (config.vocab_size,)
    if in_draft is not None and not (flagged and np.array_equal(np.flatnonzero(in_draft), ids)):
        raise ValueError(f"{TO_DRAFT}: must be {config.vocab_size} flags that mark the ids of {TO_TARGET}")
    return ids.astype(np.int32)


def changed_maps(
    ids: np.ndarray | None, config: Eagle3Config | BlockConfig, carried: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the maps of these ids to write; none if there are no ids, or if the carried tensors hold their maps."""
    known = read_target_ids(carried, config) if TO_TARGET in carried else None
    if ids is None or (known is not None and np.array_equal(known, ids)):
        return {}
    offsets = ids.astype(np.int64) - np.arange(len(ids))
    return {TO_TARGET: offsets, TO_DRAFT: np.isin(np.arange(config.vocab_size), ids)}
