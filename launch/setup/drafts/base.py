"""Arguments and result of a draft builder."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import HEADS, DraftConfig, RunConfig
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from launch.setup.draft_vocabulary import frequent_tokens
from models.checkpoints.draft import SavedDraft, save_named_draft
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.mtp import MTPHead
from specjax.cost import DraftSheet
from specjax.drafters import Drafter, HeadDrafter
from specjax.short_repr import short_repr
from specjax.types import Policy, PyTree

# What a draft needs that is loaded correctly and still disagrees with the policy.
MORE_TRAINING = "more training on this policy's answers (launch.distill, --draft-training.every)"


class DraftContext(NamedTuple):
    """Arguments of a draft builder.

    Attributes:
        config:    config of the run; its `draft` section describes the draft.
        policy:    the policy that the draft is for.
        weights:   parameters of the policy.
        decoder:   config of the policy's decoder; None if model.family names a user function.
        mesh:      devices for the parameters. Parameters that a user's builder does not place on it are replicated.
        key:       key for random weights. None: the parameters are ShapeDtypeStructs, and no weights are read.
        problems:  training problems; empty if the program does not need them.
        tokenizer: tokenizer for the problems.
        saved:     EAGLE-3 head or block draft of draft.path. It is read before the policy is built, because it
                   determines the layers that the policy returns as features.
    """

    config: RunConfig
    policy: Policy
    weights: PyTree
    decoder: DecoderConfig | None
    mesh: Mesh
    key: jax.Array | None
    problems: Sequence[Problem]
    tokenizer: Tokenizer
    saved: SavedDraft | None = None


class PublicLayout(NamedTuple):
    """A public layout in which a draft is written.

    Attributes:
        dialect:  its name.
        verifier: name or path of the policy for serving engines. Only the dialect speculators states it.
        policy:   embedding and vocabulary head of the policy. Only deepspec, which holds copies, needs them.
    """

    dialect: Dialect
    verifier: str | None = None
    policy: PyTree = None


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft with its parameters, and facts about it that the programs need.

    A user's builder returns `Draft(drafter, params)`; `build_draft` sets the other fields.

    Attributes:
        drafter:   the drafter, which proposes tokens.
        params:    parameters of the drafter; empty if it has none.
        kind:      the run's draft.kind.
        read_from: option that names the directory of the weights; None if they are random or there are none.
        made_for:  content of `made_for.json` in that directory.
    """

    drafter: Drafter
    params: PyTree = field(default_factory=dict)
    kind: str = "none"
    read_from: str | None = None
    made_for: MadeFor | None = None

    __repr__ = short_repr

    # Usual reasons why a draft from a checkpoint is accepted far too rarely, for the text of the alarm.
    usual_causes: ClassVar[str] = "it was made for another policy, or its config.json is not that of its weights"
    # True if the draft is saved as part of the policy.
    in_policy: ClassVar[bool] = False

    @property
    def policy_width(self) -> int | None:
        """Hidden size that the policy must have; None if the draft fits any policy."""
        return None

    @property
    def has_params(self) -> bool:
        """True if the draft has parameters to train."""
        return bool(jax.tree.leaves(self.params))

    @property
    def target_ids(self) -> np.ndarray | None:
        """Policy ids of a reduced draft vocabulary, int32, ascending; None if the draft has the full vocabulary."""
        return getattr(self.drafter, "target_ids", None)

    @property
    def sheet(self) -> DraftSheet | None:
        """Sizes for the cost model; None for a draft without parameters, and for one of a user's builder."""
        return None

    def with_target_ids(self, ids: np.ndarray) -> Self:
        """Return the draft with `ids` as its reduced vocabulary, which must have the same size."""
        return replace(self, drafter=replace(self.drafter, target_ids=ids))  # pyright: ignore[reportArgumentType]

    def differences(self) -> str | None:
        """Return one line that lists differences between a draft from a checkpoint and the policy; None if none."""
        return None

    def policy_head(self, params: PyTree) -> MTPHead:
        """Return the head with these parameters, to save with the policy. Raises ValueError unless `in_policy`."""
        raise ValueError(f"draft.kind = {self.kind}: is not saved as part of the policy")

    def check_writable(self, dialect: Dialect | None = None) -> None:
        """Raise ConfigError if `write` cannot write the draft. dialect: None for the layout that --draft.path reads."""
        if not self.has_params:
            raise ConfigError(f"draft.kind = {self.kind}: has no parameters to write")
        if dialect is not None:
            kinds = " or ".join(HEADS)
            raise ConfigError(f"dialect = {dialect}: allowed only with draft.kind = {kinds}, not {self.kind}")

    def write(self, directory: Path, params: PyTree, layout: PublicLayout | None = None) -> None:
        """Write the draft with these parameters to a new directory. Call `check_writable` first.

        Raises ValueError if the directory is in use.

        layout: None for the layout that --draft.path reads.
        """
        save_named_draft(directory, self.kind, params)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureDraft(Draft, ABC):
    """A draft that reads features of the policy and has files of its own: an EAGLE-3 head or a block draft.

    Attributes:
        head:    config of the draft.
        decoder: config of the policy's decoder, whose feature layers are those that the draft reads.
    """

    head: Any
    decoder: DecoderConfig

    usual_causes = "it reads other layers than it was trained with, has another rope base, or is for another policy"
    # Public layouts of this kind of draft.
    dialects: ClassVar[tuple[Dialect, ...]]

    @property
    def policy_width(self) -> int:
        return self.head.hidden_size

    @abstractmethod
    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        """Return the draft's `config.json` in this dialect. Raises ValueError if it cannot describe the draft."""

    def check_writable(self, dialect: Dialect | None = None) -> None:
        if dialect is not None:
            try:
                self.public_config(dialect)
            except ValueError as error:
                raise ConfigError(f"dialect = {dialect}: {error}") from error

    def only_ours(self) -> str | None:
        """Return a line that says why no public layout holds the draft; None if one does."""
        reasons = list[str]()
        for dialect in self.dialects:
            try:
                self.public_config(dialect)
            except ValueError as error:
                reasons.append(str(error))
            else:
                return None
        why = "; ".join(dict.fromkeys(reasons))
        return f"draft: only our own layout can hold it, not {', '.join(self.dialects)}: {why}"


def own_vocabulary(context: DraftContext, vocab_size: int) -> np.ndarray | None:
    """Return the policy's ids of the reduced vocabulary of a fresh draft; None: all `vocab_size`, the policy's."""
    size = context.config.draft.vocab_size
    if size is None:
        return None
    if context.key is None:
        return np.arange(size, dtype=np.int32)
    return frequent_tokens(context.problems, context.tokenizer, size, vocab_size)


def with_options(drafter: HeadDrafter, options: DraftConfig) -> HeadDrafter:
    """Return the drafter with those options of the draft section that do not depend on its network."""
    head = replace(drafter.head, eight_bit=options.rollout_dtype)
    return replace(drafter, head=head, unroll=options.unroll, decay=options.decay, objective=options.loss)


def param_dtype(params: PyTree) -> str:
    """Return the name of the dtype that all parameters of a network share."""
    return jax.tree.leaves(params)[0].dtype.name
