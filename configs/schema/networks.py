"""The sections of a run that describe its networks: the policy and its draft."""

from dataclasses import dataclass, field, fields
from typing import Literal

from configs.schema.functions import check_function, is_function
from models.config import DecoderConfig, Dtype, Remat, at_least_one
from models.drafts.mtp import ConventionName
from specjax.drafters.distillation import Objective, check_passes
from specjax.drafters.lookup import check_lengths

DRAFT_KINDS = ("eagle3", "mtp", "model", "none")


@dataclass(frozen=True)
class ModelConfig:
    """The policy.

    Attributes:
        path:           a directory in Hugging Face layout, or one that launch.convert made; None starts from scratch.
        family:         builds a policy of one's own, as package.module:name. Checkpoints name a built-in family.
        architecture:   the network to start from scratch.
        feature_layers: the layers on whose entry an EAGLE-3 draft reads the policy; empty for the paper's choice.
        dtype:          of the computation.
        param_dtype:    of the master weights.
        remat:          what the backward pass of training computes again to save memory, a layer at a time: nothing,
                        all but the products with weights (dots), or everything (full).
    """

    path: str | None = None
    family: str | None = None
    architecture: DecoderConfig | None = None
    feature_layers: tuple[int, ...] = ()
    dtype: Dtype = "bfloat16"
    param_dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_function("family", self.family)


@dataclass(frozen=True)
class HeadConfig:
    """The make of an EAGLE-3 head from random weights, in the words of public checkpoints.

    See models.drafts.eagle3.Eagle3Config.

    Attributes:
        num_layers:           decoder layers.
        sliding_window:       how many of the last positions its attention sees; None for all.
        qk_norm:              norm queries and keys, as Qwen3 does.
        use_aux_hidden_state: read feature layers; False reads the policy's last hidden state alone.
        norm_before_fc:       norm the concatenated features (EAGLE-3.1).
        fc_norm:              norm each of them instead.
        norm_before_residual: add to the normed feature.
        norm_output:          feed back the normed state (EAGLE-3.1).
    """

    num_layers: int = 1
    sliding_window: int | None = None
    qk_norm: bool = False
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class LookupConfig:
    """Drafting what followed the same words before. Beside a draft it has its say where it finds something.

    Attributes:
        kind:   ngram looks in a sequence's own text; history also in those of the other samples of its prompt, and of
                earlier rollouts; none does not look.
        min_n:  tokens that a match has at least.
        max_n:  tokens that are compared at most.
        kept:   completions of each training prompt that history keeps: 4 * problems * kept * rollout.max_new_tokens
                bytes on every device, and in checkpoints.
        factor: a draft of history is at most factor * match + offset tokens long.
        offset: see factor.
    """

    kind: Literal["none", "ngram", "history"] = "none"
    min_n: int = 3
    max_n: int = 8
    kept: int = 4
    factor: float = 1.0
    offset: int = 0

    def __post_init__(self) -> None:
        check_lengths(self.min_n, self.max_n)
        at_least_one(self, "kept")
        for name in ("factor", "offset"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0")


@dataclass(frozen=True)
class DraftConfig:
    """The draft, from a checkpoint or from random weights. A width left at None is the policy's own.

    Attributes:
        kind:         eagle3; mtp, a head of the policy's own shape, from the policy's checkpoint; model, a small policy
                      of the same vocabulary; none, which drafts by the lookup alone, and without one decodes
                      autoregressively; or package.module:name, which builds a drafter of one's own.
        path:         a directory of ours, or of SpecForge, SafeAILab or speculators; None starts from random weights.
                      Of a model, what model.path is of the policy.
        vocab_size:   draft the most frequent tokens of the training problems alone; None drafts all of the policy's.
        head:         the make of a head from random weights.
        architecture: of a model from random weights.
        loss:         what distillation makes smaller: soft cross_entropy, kl, total_variation (one less the acceptance
                      to expect), or hybrid, from kl to total_variation as acceptance rises
                      (specjax.drafters.distillation).
        unroll:       passes of EAGLE-3's training-time test, 1 .. 7.
        decay:        weight of each pass in the loss, relative to the one before.
        mtp_convention: the family after which an mtp head is made from random weights; None reads that of model.path.
        lookup:       drafting from texts that are known, by itself or beside the draft.
    """

    kind: str = "eagle3"
    path: str | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    head: HeadConfig = field(default_factory=HeadConfig)
    architecture: DecoderConfig | None = None
    loss: Objective = "cross_entropy"
    unroll: int = 3
    decay: float = 0.8
    mtp_convention: ConventionName | None = None
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def __post_init__(self) -> None:
        if self.kind not in DRAFT_KINDS and not is_function(self.kind):
            raise ValueError(f"kind = {self.kind}: must be one of {', '.join(DRAFT_KINDS)}, or package.module:name")
        sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        given = [name for name in sizes if getattr(self, name) is not None]
        at_least_one(self, *given)
        check_passes(self.unroll, self.decay)
        if self.kind not in DRAFT_KINDS:
            return
        if self.kind == "model" and given:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])}: must be none with kind model")
        # Neither widths nor passes: a recipe has them for its draft, and is to be run without a draft too.
        if self.kind == "none" and self.vocab_size is not None:
            raise ValueError(f"vocab_size = {self.vocab_size}: must be none with kind none")
        if self.kind in ("model", "none"):
            self._refuse_head(f"with kind {self.kind}, which has no head")
        if self.kind == "model":
            for option in fields(DraftConfig):
                value = getattr(self, option.name)
                if option.name in ("unroll", "decay") and value != option.default:
                    raise ValueError(f"{option.name} = {value}: must be left alone with kind {self.kind}")
        if self.kind == "model" and (self.path is None) == (self.architecture is None):
            raise ValueError(f"path = {self.path}: kind model takes either a path or an architecture")
        if self.kind != "model" and self.architecture is not None:
            raise ValueError(f"architecture: must be none with kind {self.kind}")
        if self.mtp_convention is not None and self.kind != "mtp":
            raise ValueError(f"mtp_convention = {self.mtp_convention}: must be none with kind {self.kind}")
        if self.path is not None and self.kind not in ("eagle3", "model"):
            raise ValueError(f"path = {self.path}: must be none with kind {self.kind}")
        if self.path is None and self.kind != "mtp":
            return
        sayer = "kind mtp" if self.path is None else "path"
        if given:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])}: must be none with {sayer}, which says it")
        self._refuse_head(f"with {sayer}, which says it")

    def _refuse_head(self, why: str) -> None:
        for option in fields(HeadConfig):
            value = getattr(self.head, option.name)
            if value != option.default:
                raise ValueError(f"head.{option.name} = {value}: must be left alone {why}")

    @property
    def proposes(self) -> bool:
        """Whether there is anything to draft with."""
        return self.kind != "none" or self.lookup.kind != "none"
