"""Sections of a run that describe its networks: the policy and its draft."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from configs.schema.functions import check_function, is_function
from models.config import DecoderConfig, Dtype, HeadDim, Remat
from models.drafts.mtp import ConventionName
from specjax.drafters.distillation import Objective, PassDecay, Passes
from specjax.drafters.lookup import MatchLength, check_lengths
from specjax.options import MOST_DRAFTED, DraftLength, Layers, NonNegative, Options, Positive, Weight, at_least, at_most
from specjax.types import EightBit

DRAFT_KINDS = ("eagle3", "dflash", "dspark", "mtp", "model", "none")
BLOCKS = ("dflash", "dspark")
# Read features of the policy, and have files of their own.
HEADS = ("eagle3", *BLOCKS)


@dataclass(frozen=True)
class ModelConfig(Options):
    """The policy.

    Attributes:
        path:           Directory in Hugging Face layout. None: random weights.
        family:         Builder of your own policy, as package.module:name. None: a built-in family, which the
                        checkpoint names.
        architecture:   Network with random weights; used if path is None.
        feature_layers: Layers whose input the draft reads, counted from 0. Empty: those of the draft's checkpoint,
                        else 2, L/2 and L-3 of L layers for EAGLE-3, five of them for a block draft; of a policy with
                        fewer, those that there are.
        dtype:          Dtype of the computation.
        param_dtype:    Dtype of the master weights.
        rollout_dtype:  int8 or fp8: the rollout samples from a copy with kernels in 8 bits, another law than the one
                        that is trained; loss.importance_cap corrects for it. None: dtype.
        remat:          Activations that the backward pass recomputes instead of keeping them in memory: none; dots, all
                        but the results of matmuls and of cuDNN's attention; full, all within a layer.
    """

    path: str | None = None
    family: str | None = None
    architecture: DecoderConfig | None = None
    feature_layers: tuple[NonNegative, ...] = ()
    dtype: Dtype = "bfloat16"
    param_dtype: Dtype = "float32"
    rollout_dtype: EightBit | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("family", self.family)
        if self.rollout_dtype is not None and self.family is not None:
            raise ValueError(f"rollout_dtype = {self.rollout_dtype}: must be None with a user's model family")


@dataclass(frozen=True)
class HeadConfig(Options):
    """An EAGLE-3 head or block draft with random weights. Fields are named as in public checkpoints.

    See models.drafts.eagle3.Eagle3Config. A block draft reads only the first four (models.drafts.block.BlockConfig).

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
        if self.kind not in DRAFT_KINDS and not is_function(self.kind):
            raise ValueError(f"kind = {self.kind}: must be one of {', '.join(DRAFT_KINDS)}, or package.module:name")
        if self.rollout_dtype is not None and self.kind not in (*HEADS, "mtp", "model"):
            raise ValueError(f"rollout_dtype = {self.rollout_dtype}: must be None with kind {self.kind}")
        # Widths and `head` describe a draft with random weights, `unroll` how EAGLE-3 and MTP heads learn. Lookups and
        # block drafts ignore what is not theirs, so that a recipe can run with any of them.
        if self.kind not in DRAFT_KINDS:
            return
        if self.vocab_size is not None and (self.kind not in HEADS or self.path is not None):
            other = "path" if self.kind in HEADS else f"kind {self.kind}"
            raise ValueError(f"vocab_size = {self.vocab_size}: must be None with {other}")
        if self.kind == "model":
            for name, default in (("unroll", DraftConfig.unroll), ("decay", DraftConfig.decay)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} = {getattr(self, name)}: must be {default} with kind model")
            if (self.path is None) == (self.architecture is None):
                raise ValueError(f"path = {self.path}: must be set for kind model if architecture is None, else None")
        elif self.architecture is not None:
            raise ValueError(f"architecture: must be None with kind {self.kind}")
        if self.mtp_convention is not None and self.kind != "mtp":
            raise ValueError(f"mtp_convention = {self.mtp_convention}: must be None with kind {self.kind}")
        if self.path is not None and self.kind not in (*HEADS, "model"):
            raise ValueError(f"path = {self.path}: must be None with kind {self.kind}")

    @property
    def proposes(self) -> bool:
        """Return whether there is anything to draft with."""
        return self.kind != "none" or self.lookup.kind != "none"
