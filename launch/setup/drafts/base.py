"""Arguments and result of a draft builder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import KINDS, DraftConfig, RunConfig, kind_of
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from launch.setup.draft_vocabulary import frequent_tokens
from launch.setup.drafts.saved_head import fit_head
from launch.setup.policy import random_params
from models.checkpoints.draft import SavedDraft, init_of, save_draft_checkpoint, save_named_draft
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.drafts.shape import FeatureDraftConfig
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.mtp import MTPHead
from specjax.cost import DraftSheet
from specjax.drafters import BlockDrafter, Drafter, HeadDrafter
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

    def only_ours(self) -> str | None:
        """Return a line that says why no public layout can hold the draft; None if one can, or its kind has none."""
        return None

    def policy_head(self, params: PyTree) -> MTPHead:
        """Return the head with these parameters, to save with the policy. Raises ValueError unless `in_policy`."""
        raise ValueError(f"draft.kind = {self.kind}: is not saved as part of the policy")

    def check_writable(self, dialect: Dialect | None = None) -> None:
        """Raise ConfigError if `write` cannot write the draft. dialect: None for the layout that --draft.path reads."""
        if not self.has_params:
            raise ConfigError(f"draft.kind = {self.kind}: has no parameters to write")
        if dialect is not None:
            kinds = " or ".join(name for name, kind in KINDS.items() if kind.feature_layers is not None)
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
    # (config of the draft, policy, ids of a reduced vocabulary) -> drafter.
    make: ClassVar[Callable[[Any, Policy, np.ndarray | None], HeadDrafter | BlockDrafter]]

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        """Return the draft of draft.path, or one with random weights.

        Raises ValueError if it does not fit the policy, and ConfigError if it drafts fewer tokens than the run asks.
        """
        options, policy, rollout = context.config.draft, context.decoder, context.config.rollout
        assert policy is not None
        if context.saved is None:
            head = cls.fresh(options, policy, context.tokenizer)
            head.check(policy)
            params = random_params(init_of(head), context.key, context.mesh)
            ids = own_vocabulary(context, policy.vocab_size)
        else:
            weights = None if context.key is None else context.weights
            head, params, ids, _ = fit_head(context.saved, context.config, policy, weights)
        for name in ("draft_length", "draft_lengths"):
            # Evaluation and generation draft at `draft_length`, whatever rollouts choose from.
            most, lengths = head.most_drafted, getattr(rollout, name)
            if most is not None and np.max(lengths, initial=0) > most:
                raise ConfigError(f"rollout.{name} = {lengths}: must be at most {most}, the draft's block_size")
        drafter = with_options(cls.make(head, context.policy, ids), options)
        read_from = None if context.saved is None else "draft.path"
        return cls(drafter=drafter, params=params, head=head, decoder=policy, read_from=read_from)

    @staticmethod
    @abstractmethod
    def fresh(options: DraftConfig, policy: DecoderConfig, tokenizer: Tokenizer) -> FeatureDraftConfig:
        """Return the shape of a draft with random weights. Sizes that the options do not set are the policy's."""

    @property
    def policy_width(self) -> int:
        return self.head.hidden_size

    def differences(self) -> str | None:
        if self.read_from is None:
            return None
        shared = ("rope_theta", "rope_scaling", "max_positions")
        # (name, the draft's value, the expected value, whose value that is)
        compared = [(name, getattr(self.head, name), getattr(self.decoder, name), "the policy's") for name in shared]
        compared += self.layers_compared()
        if (made_for := self.made_for) is not None:
            compared.append(("a policy of num_layers", made_for.num_layers, self.decoder.num_layers, "this policy's"))
        differing = [
            f"{name} = {value} ({whose}: {expected})" for name, value, expected, whose in compared if value != expected
        ]
        if not differing:
            return None
        line = f"the draft of draft.path was made with {', '.join(differing)}"
        if self.head.max_positions < self.decoder.max_positions:
            line += f"; acceptance may fall beyond {self.head.max_positions} positions"
        return line

    def layers_compared(self) -> list[tuple[str, Any, Any, str]]:
        """Return what `differences` compares of the layers that the draft reads; nothing where kinds vary in them."""
        return []

    @abstractmethod
    def public_config(self, dialect: Dialect) -> dict[str, Any]:
        """Return the draft's `config.json` in this dialect. Raises ValueError if it cannot describe the draft."""

    @abstractmethod
    def publish(self, directory: Path, draft: SavedDraft, layout: PublicLayout) -> None:
        """Write this draft to a new directory in a public layout."""

    def check_writable(self, dialect: Dialect | None = None) -> None:
        if dialect is not None:
            try:
                self.public_config(dialect)
            except ValueError as error:
                raise ConfigError(f"dialect = {dialect}: {error}") from error

    def write(self, directory: Path, params: PyTree, layout: PublicLayout | None = None) -> None:
        head = replace(self.written_head(), param_dtype=jax.tree.leaves(params)[0].dtype.name)
        if layout is None:
            save_draft_checkpoint(directory, params, head, self.target_ids, self.decoder.feature_layers)
        else:
            self.publish(directory, SavedDraft(head, params, self.target_ids, self.decoder.feature_layers), layout)

    def written_head(self) -> FeatureDraftConfig:
        """Return the config that files of the draft state, but for the dtype of its parameters."""
        return self.head

    def only_ours(self) -> str | None:
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


def with_options(drafter: HeadDrafter | BlockDrafter, options: DraftConfig) -> HeadDrafter | BlockDrafter:
    """Return the drafter with those options of the draft section that do not depend on its network."""
    changes: dict[str, Any] = {"head": replace(drafter.head, eight_bit=options.rollout_dtype)}
    changes |= {"decay": options.decay, "objective": options.loss}
    if kind_of(options.kind).reads("draft.unroll"):
        changes["unroll"] = options.unroll
    return replace(drafter, **changes)
