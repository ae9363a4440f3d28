"""What a run is: typed, frozen dataclasses that recipes compose and the command line overrides.

The options of an algorithm stand beside it in `specjax`; here are those of models, data, evaluation and logging.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from models.config import DecoderConfig, Dtype, at_least_one
from models.mtp import ConventionName
from specjax.adaptation import DraftTrainingConfig
from specjax.drafters.distillation import Objective
from specjax.drafters.lookup import check_lengths
from specjax.loss import LossConfig
from specjax.mesh import MeshConfig
from specjax.optimizer import OptimizerConfig
from specjax.plan import RolloutConfig
from specjax.train_step import TrainConfig
from specjax.verify import VERIFIERS


@dataclass(frozen=True)
class ModelConfig:
    """The policy.

    Attributes:
        path:           a directory in Hugging Face layout, or one that launch.convert made; None starts from scratch.
        architecture:   the network to start from scratch.
        feature_layers: the layers on whose entry an EAGLE-3 draft reads the policy; empty for the paper's choice.
        dtype:          of the computation.
        param_dtype:    of the master weights.
    """

    path: str | None = None
    architecture: DecoderConfig | None = None
    feature_layers: tuple[int, ...] = ()
    dtype: Dtype = "bfloat16"
    param_dtype: Dtype = "float32"


@dataclass(frozen=True)
class HeadConfig:
    """The make of an EAGLE-3 head from random weights, in the words of public checkpoints (models.eagle3.Eagle3Config).

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
        kind:         eagle3; mtp, a head of the policy's own shape, from the policy's checkpoint where that has one;
                      model, a small policy of the same vocabulary; or none, which drafts by the lookup alone, and
                      without one decodes autoregressively.
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
        mtp_convention: the family after which an mtp head from random weights is made.
        lookup:       drafting from texts that are known, by itself or beside the draft.
    """

    kind: Literal["eagle3", "mtp", "model", "none"] = "eagle3"
    path: str | None = None
    hidden_size: int | None = None
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
    mtp_convention: ConventionName = "qwen3_next"
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        given = [name for name in sizes if getattr(self, name) is not None]
        at_least_one(self, *given)
        if not 1 <= self.unroll <= 7:
            raise ValueError(f"unroll = {self.unroll}: must be within 1 .. 7")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay}: must be in (0, 1]")
        if self.kind == "model" and given:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])}: must be none with kind model")
        if self.kind == "model" and (self.path is None) == (self.architecture is None):
            raise ValueError(f"path = {self.path}: kind model takes either a path or an architecture")
        if self.kind != "model" and self.architecture is not None:
            raise ValueError(f"architecture: must be none with kind {self.kind}")
        if self.path is not None and self.kind not in ("eagle3", "model"):
            raise ValueError(f"path = {self.path}: must be none with kind {self.kind}")
        if self.path is None and self.kind != "mtp":
            return
        sayer = "kind mtp" if self.path is None else "path"
        if given:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])}: must be none with {sayer}, which says it")
        for option in fields(HeadConfig):
            value = getattr(self.head, option.name)
            if value != option.default:
                raise ValueError(f"head.{option.name} = {value}: must be left alone with {sayer}, which says it")

    @property
    def proposes(self) -> bool:
        """Whether there is anything to draft with."""
        return self.kind != "none" or self.lookup.kind != "none"


@dataclass(frozen=True)
class ArithmeticConfig:
    """The built-in task: sums with worked steps.

    Attributes:
        problems:  how many, held-out ones included.
        min_terms: numbers in a sum, at least.
        max_terms: numbers in a sum, at most.
        max_value: each number is 1 .. max_value.
    """

    problems: int = 4096
    min_terms: int = 3
    max_terms: int = 6
    max_value: int = 9


@dataclass(frozen=True)
class DataConfig:
    """The problems to train on and those held out.

    Attributes:
        train:             a JSONL file; None generates the built-in task that `arithmetic` describes.
        held_out:          a JSONL file to evaluate on; None holds some of the training problems out.
        held_out_count:    how many of them.
        prompt_field:      of a line, the problem.
        answer_field:      of a line, the answer.
        solution_field:    of a line, a worked solution to warm up on; None where there is none.
        answer_after:      the answer is what follows the last such marker in its field ("####" in GSM8K).
        instruction:       how a prompt is put to the model; {prompt} stands for it, other braces are doubled.
        tokenizer:         `checkpoint` is the one in the model's directory, with its chat template; built in are
                           `bytes` and `characters`, those of the built-in task.
        enable_thinking:   handed to the chat template where set.
        prompts:           in a batch, over all shards.
        max_prompt_tokens: longer prompts are dropped and counted.
        arithmetic:        the built-in task; None where the problems are to come from a file.
    """

    train: str | None = None
    held_out: str | None = None
    held_out_count: int = 256
    prompt_field: str = "question"
    answer_field: str = "answer"
    solution_field: str | None = None
    answer_after: str | None = None
    instruction: str = "{prompt}"
    tokenizer: Literal["checkpoint", "bytes", "characters"] = "checkpoint"
    enable_thinking: bool | None = None
    prompts: int = 32
    max_prompt_tokens: int = 512
    arithmetic: ArithmeticConfig | None = None


@dataclass(frozen=True)
class RewardConfig:
    """How completions are scored.

    Attributes:
        scorer:       exact (what follows the last '#'), math (math-verify) or package.module:function, on the host;
                      or exact_traced, the first inside the program, which wants the stop token behind the answer.
        workers:      processes of a host scorer.
        time_limit_s: for one sample; beyond it the sample counts as failed.
    """

    scorer: str = "exact"
    workers: int = 2
    time_limit_s: float = 5.0


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the problems' own solutions before RL, for a policy from scratch.

    Attributes:
        steps:      how many; 0 skips them.
        batch_size: problems in a step.
    """

    steps: int = 0
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-3))


@dataclass(frozen=True)
class DistillConfig:
    """Distillation of the draft from the policy's own answers: what launch.distill does, and launch.train before RL.

    The optimiser is `draft_optimizer`, whose rate falls to zero towards the last step.

    Attributes:
        steps:        how many; 0 skips them in launch.train, and in launch.distill goes four times over the answers.
        answers:      how many the policy generates, in rollouts of the run's own shape.
        chunks:       parts in which it does, with a part of the steps behind each: from the second on the draft drafts.
        batch_size:   answers in a step.
        microbatches: parts in which its gradient is accumulated.
    """

    steps: int = 0
    answers: int = 4096
    chunks: int = 4
    batch_size: int = 32
    microbatches: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "answers", "chunks", "batch_size", "microbatches")
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}: must be at least 0")


@dataclass(frozen=True)
class EvalConfig:
    """In-training validation on held-out prompts, by the rollout's own law.

    Attributes:
        every:   steps from one to the next; 0 never.
        prompts: how many, the first of those held out.
        samples: completions of each.
    """

    every: int = 0
    prompts: int = 64
    samples: int = 1

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "samples")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves that a run can be resumed from, the last of them at its end.

    Attributes:
        every: steps from one to the next; 0 never saves.
        keep:  how many stay, the newest.
    """

    every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        at_least_one(self, "keep")


@dataclass(frozen=True)
class SpeedupConfig:
    """The closing comparison: held-out prompts generated at every slot count and draft length, each at its best.

    Attributes:
        slots:         sequences decoded at a time on each shard, to begin with; empty skips the comparison.
        draft_lengths: K of the speculative settings.
        prompts:       how many sequences in all.
        repeats:       timings of the best settings of each kind, side by side.
    """

    slots: tuple[int, ...] = ()
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    prompts: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        at_least_one(self, "prompts", "repeats")
        for name in ("slots", "draft_lengths"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)}: each must be at least 1")
        if self.slots and not self.draft_lengths:
            raise ValueError("draft_lengths = (): must name one to compare with, or slots be empty")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run of launch.train.

    Attributes:
        name:                of the recipe.
        steps:               RL steps in all, those before a resume included.
        seed:                of the data's order, fresh parameters and all noise.
        out:                 run directory; None takes runs/NAME, or the next free number behind it.
        resume:              continue the run in `out` (or the newest of NAME) from its last checkpoint.
        probe_every:         run every n-th step stage by stage against the clock; 0 never.
        print_every:         print every n-th step, and those that measured more; metrics.jsonl has them all.
        microbatches:        parts in which gradients are accumulated.
        cost_table:          a cost_table.json to choose among rollout.draft_lengths by; None measures, at the start and
                             at probes.
        ladder:              total lengths, ascending, to the shortest fitting of which each microbatch of sorted rows
                             is cut; empty pads every row to the full length.
        allow_truncated_law: train although top-k, top-p, min-p or temperature 0 cut tokens out of the rollout's law.
    """

    name: str
    steps: int
    seed: int = 0
    out: str | None = None
    resume: bool = False
    probe_every: int = 20
    print_every: int = 1
    microbatches: int = 1
    cost_table: str | None = None
    ladder: tuple[int, ...] = ()
    allow_truncated_law: bool = False
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    draft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    speedup: SpeedupConfig = field(default_factory=SpeedupConfig)

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "print_every")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed = {self.seed}: must be between 0 and {2**31 - 1}")
        if self.cost_table is not None and not self.rollout.draft_lengths:
            raise ValueError(f"cost_table = {self.cost_table}: must be none without rollout.draft_lengths")
        if self.rollout.verifier not in VERIFIERS:
            raise ValueError(f"rollout.verifier: must be one of {', '.join(VERIFIERS)} in a recipe, to be written down")

    def train_config(self) -> TrainConfig:
        """The part of the run that is one step of the algorithm. Raises ValueError where its options clash."""
        draft_training = self.draft_training
        if self.draft.kind == "none":
            draft_training = DraftTrainingConfig(mode="frozen")
        return TrainConfig(
            seed=self.seed,
            rollout=self.rollout,
            loss=self.loss,
            policy_optimizer=self.policy_optimizer,
            draft_optimizer=self.draft_optimizer,
            microbatches=self.microbatches,
            ladder=self.ladder,
            draft_training=draft_training,
            allow_truncated_law=self.allow_truncated_law,
        )
