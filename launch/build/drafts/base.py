"""The arguments and the result of a draft builder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from models.checkpoints.draft import SavedDraft, save_named_draft
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.hf.eagle3_dialects import Dialect
from models.hf.mtp_files import MTPHead
from specjax.drafters import Drafter
from specjax.types import Policy, PyTree


class DraftContext(NamedTuple):
    """Arguments of a draft builder.

    Attributes:
        config:   the run; its `draft` section is the draft's.
        policy:   the policy that the draft is for.
        weights:  parameters of the policy.
        decoder:  shape of the policy; None if model.family is one's own.
        mesh:     where parameters belong. Those that a builder of one's own leaves elsewhere are replicated on it.
        key:      for random weights.
        problems: training problems, and the tokenizer of their texts.
        saved:    EAGLE-3 head of draft.path, which is read first, because it tells which layers the policy must give.
    """

    config: RunConfig
    policy: Policy
    weights: PyTree
    decoder: DecoderConfig | None
    mesh: Mesh
    key: jax.Array
    problems: Sequence[Problem]
    tokenizer: Tokenizer
    saved: SavedDraft | None = None


@dataclass(frozen=True)
class Draft:
    """A draft, and what the programs ask of it. Builders of one's own return one of `drafter` and `params`.

    Attributes:
        drafter:   proposes tokens.
        params:    its parameters, empty if it has none.
        kind:      draft.kind; filled in by `build_draft`.
        read_from: the option that names the directory of its weights; None if it started from random ones, or has none.
        made_for:  what that directory states; filled in by `build_draft`.
    """

    drafter: Drafter
    params: PyTree = field(default_factory=dict)
    kind: str = "none"
    read_from: str | None = None
    made_for: MadeFor | None = None

    # What usually is wrong with a draft of this kind that is read from a checkpoint and accepted far too seldom.
    usual_causes: ClassVar[str] = "it was made for another policy, or its config.json is not that of its weights"
    # Whether the draft is saved as a part of the policy.
    in_policy: ClassVar[bool] = False

    @property
    def policy_width(self) -> int | None:
        """The hidden size of the policy that a head is for; None for other drafts, which fit any."""
        return None

    @property
    def has_params(self) -> bool:
        """Return whether there are parameters to train."""
        return bool(jax.tree.leaves(self.params))

    @property
    def target_ids(self) -> np.ndarray | None:
        """The policy's ids of a reduced draft vocabulary, int32 ascending; None if the draft has all of them."""
        return getattr(self.drafter, "target_ids", None)

    def with_target_ids(self, ids: np.ndarray) -> Self:
        """Return the draft with a reduced vocabulary of the same size, made of `ids`."""
        return replace(self, drafter=replace(self.drafter, target_ids=ids))  # pyright: ignore[reportArgumentType]

    def differences(self) -> str | None:
        """Return one line about what a draft from a checkpoint differs in from its policy; None for nothing."""
        return None

    def policy_head(self, params: PyTree) -> MTPHead:
        """Return the head with these parameters, for the policy to be written with; of a draft that is `in_policy`."""
        raise ValueError(f"draft.kind = {self.kind}: is not a part of the policy")

    def check_writable(self, dialect: Dialect | None = None) -> None:
        """Raise ConfigError if the draft cannot be written by itself, in our format or in `dialect`."""
        if not self.has_params:
            raise ConfigError(f"draft.kind = {self.kind}: has no parameters to write")
        if dialect is not None:
            raise ConfigError(f"dialect = {dialect}: for an EAGLE-3 head alone, draft.kind is {self.kind}")

    def write(
        self, directory: Path, params: PyTree, dialect: Dialect | None = None, verifier: str | None = None
    ) -> None:
        """Write the draft with these parameters by itself; `check_writable` let it pass.

        verifier: the policy's name as a serving engine knows it, or its path, for speculators' file to state.
        Raises ValueError if the directory is in use.
        """
        save_named_draft(directory, self.kind, params)
