"""Section of a run that describes its draft, and the kinds of drafts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal

from configs.schema.functions import is_function
from models.config import DecoderConfig, HeadDim, block_feature_layers, eagle3_feature_layers
from models.drafts.mtp import ConventionName
from specjax.drafters.distillation import Objective, PassDecay, Passes
from specjax.drafters.lookup import MatchLength, check_lengths
from specjax.options import MOST_DRAFTED, DraftLength, Layers, Options, Positive, Weight, at_least, at_most, show
from specjax.types import EightBit


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft.

    Attributes:
        title:          Name in reports.
        options:        Fields of DraftConfig that it reads, beside `kind` and `lookup`; fields of `head` as head.NAME.
        feature_layers: Number of the policy's layers -> those whose input it reads unless the run names others. None:
                        it reads none.
        shape:          Fields of the network's config that make it this kind.
        any_policy:     Whether it drafts for a user's family of policies too.
    """

    title: str
    options: tuple[str, ...] = ()
    feature_layers: Callable[[int], tuple[int, ...]] | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    any_policy: bool = False

    def reads(self, path: str) -> bool:
        """Return whether an option of a run, by its path, is read with this kind of draft."""
        section, _, name = path.partition(".")
        return section != "draft" or name in self.options or name.partition(".")[0] in ("kind", "lookup", *self.options)


_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
_LOSS = ("loss", "rollout_dtype")
_HEAD = ("path", "vocab_size", *_SIZES, "head.num_layers", "head.sliding_window", *_LOSS, "decay")
_EAGLE3 = ("qk_norm", "use_aux_hidden_state", "norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}

KINDS = {
    "eagle3": DraftKind(
        "EAGLE-3 head", (*_HEAD, "unroll", *(f"head.{name}" for name in _EAGLE3)), eagle3_feature_layers
    ),
    "dflash": DraftKind(
        "DFlash block draft", (*_HEAD, "head.block_size"), block_feature_layers, {"sample_from_anchor": False}
    ),
    "dspark": DraftKind(
        "DSpark block draft", (*_HEAD, "head.block_size", "head.markov_rank"), block_feature_layers, _CONFIDENCE
    ),
    "mtp": DraftKind("MTP head", ("mtp_convention", *_LOSS, "unroll", "decay")),
    "model": DraftKind("draft model", ("path", "architecture", *_LOSS), any_policy=True),
    "none": DraftKind("none", any_policy=True),
}


def kind_of(name: str) -> DraftKind:
    """Return the kind that `draft.kind` names. A user's own drafter may read all options but `rollout_dtype`."""
    own = {option for kind in KINDS.values() for option in kind.options} - {"rollout_dtype"}
    return KINDS.get(name) or DraftKind(name, tuple(own), any_policy=True)


@dataclass(frozen=True)
class HeadConfig(Options):
    """An EAGLE-3 head or block draft with random weights. Fields are named as in public checkpoints.

    See models.drafts.eagle3.Eagle3Config and models.drafts.block.BlockConfig. Block drafts read the first four.

    Attributes:
        num_layers:           Decoder layers. None: 1, and 5 of a block draft.
        sliding_window:       Number of latest positions that attention sees. None: all.
        block_size:           Most tokens that a block draft drafts; rollout.draft_length may be less.
        markov_rank:          Rank of dspark's Markov head.
        qk_norm:              Norm queries and keys, as Qwen3 does.
        use_aux_hidden_state: Read the feature layers. False: read the policy's last hidden state alone.
        norm_before_fc:       Norm the concatenated features (EAGLE-3.1).
        fc_norm:              Norm each feature separately instead.
        norm_before_residual: The residual adds to the normed feature instead of the feature.
        norm_output:          Feed the normed state back to the next draft step (EAGLE-3.1).
    """

    num_layers: Layers | None = None
    sliding_window: Positive | None = None
    block_size: Annotated[int, at_least(1), at_most(MOST_DRAFTED)] = 7
    markov_rank: Positive = 256
    qk_norm: bool = False
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class LookupConfig(Options):
    """Drafting by lookup: propose the tokens that followed the same tokens earlier. Alone, or together with a draft.

    Attributes:
        kind:   ngram searches the sequence itself; history also searches other samples of the prompt and earlier
                rollouts. Nothing is trained.
        min_n:  Shortest match that is used, in tokens.
        max_n:  Longest match that is looked for, in tokens.
        kept:   Newest completions of each prompt that history remembers: 4 * problems * kept * max_new_tokens
                bytes per device.
        factor: history proposes at most factor * length of the match + offset tokens.
        offset: See factor.
    """

    kind: Literal["none", "ngram", "history"] = "none"
    min_n: MatchLength = 3
    max_n: MatchLength = 8
    kept: Positive = 4
    factor: Weight = 1.0
    offset: DraftLength = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.min_n, self.max_n)


@dataclass(frozen=True)
class DraftConfig(Options):
    """The draft, from a checkpoint or with random weights.

    A width, number of heads or head_dim of None is the policy's.

    Attributes:
        kind:              eagle3: an EAGLE-3 head; dflash, dspark: a block draft; mtp: the policy's own MTP head;
                           model: a small policy; none: only a lookup; or your own drafter, as package.module:name.
        path:              Checkpoint: ours, SpecForge's, SafeAILab's, speculators', z-lab's or DeepSpec's; with kind
                           model, of a policy. None: random weights.
        intermediate_size: Width of the MLP.
        num_heads:         Attention heads.
        num_kv_heads:      Key-value heads.
        head_dim:          Width of a head.
        vocab_size:        Draft only this many tokens, the most frequent of the training problems. None: all.
        head:              Details of an EAGLE-3 head or block draft with random weights.
        architecture:      Network of kind model with random weights.
        loss:              cross_entropy with the policy's distribution; kl; total_variation (1 - acceptance); hybrid,
                           from kl to total_variation as it rises; or dspark, 0.1 cross_entropy + 0.9 L1.
        unroll:            Passes of EAGLE-3's training-time test, 1 .. 7.
        decay:             Weight of a pass or drafted token over the previous.
        rollout_dtype:     Its kernels in rollouts: int8, fp8; None: as model.dtype.
        mtp_convention:    Family of an MTP head with random weights. None: read the head from model.path.
        lookup:            Drafting by lookup, alone or together with the draft.
    """

    kind: str = "eagle3"
    path: str | None = None
    intermediate_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: HeadDim | None = None
    vocab_size: Positive | None = None
    head: HeadConfig = field(default_factory=HeadConfig)
    architecture: DecoderConfig | None = None
    loss: Objective = "cross_entropy"
    unroll: Passes = 3
    decay: PassDecay = 0.8
    rollout_dtype: EightBit | None = None
    mtp_convention: ConventionName | None = None
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS and not is_function(self.kind):
            raise ValueError(f"kind = {self.kind}: must be one of {', '.join(KINDS)}, or package.module:name")
        kind = kind_of(self.kind)
        for name, value, default in self._changed():
            if not kind.reads(f"draft.{name}"):
                raise ValueError(f"{name} = {show(value)}: must be {default} with kind {self.kind}")
        if self.kind in KINDS and self.vocab_size is not None and self.path is not None:
            raise ValueError(f"vocab_size = {self.vocab_size}: must be None with path")
        if self.kind == "model" and (self.path is None) == (self.architecture is None):
            raise ValueError(f"path = {self.path}: must be set for kind model if architecture is None, else None")

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value, default) of each option of some kinds that does not have its default."""
        for section, prefix in ((self, ""), (self.head, "head.")):
            for name, value in vars(section).items():
                default = getattr(type(section), name, value)  # sections have none
                if value != default:
                    yield f"{prefix}{name}", value, default

    @property
    def proposes(self) -> bool:
        """Return whether there is anything to draft with."""
        return self.kind != "none" or self.lookup.kind != "none"

    def shape(self) -> dict[str, Any]:
        """Return what is set of the network of a draft with random weights, by the fields of its config."""
        kind = kind_of(self.kind)
        names = [name for name in kind.options if name in _SIZES or name.startswith("head.")]
        values = {name.removeprefix("head."): attrgetter(name)(self) for name in names}
        values["draft_vocab_size"] = self.vocab_size
        return {name: value for name, value in values.items() if value is not None} | kind.shape

    def replaced(self, **changes: Any) -> "DraftConfig":
        """Return the draft with other values.

        One of another kind has only vocabulary, sizes, loss and lookup in common with this one, as far as it reads
        them. One from files has the vocabulary of its files.
        """
        kind = changes.get("kind", self.kind)
        if kind in KINDS and changes.get("path") is not None:
            changes = {"vocab_size": None} | changes
        if kind == self.kind:
            return replace(self, **changes)
        shared = [name for name in ("lookup", "vocab_size", *_SIZES, *_LOSS) if kind_of(kind).reads(f"draft.{name}")]
        return DraftConfig(**{name: getattr(self, name) for name in shared} | changes)
