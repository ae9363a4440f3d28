"""What a run is: typed, frozen dataclasses that recipes compose and the command line overrides.

The options of an algorithm stand beside it in `specjax`, those of both networks in `configs.schema.networks`, those of
rewards in `configs.schema.rewards`; here are the whole, and those of data, evaluation and logging.
"""

from dataclasses import dataclass, field
from typing import Literal

from configs.schema.networks import DraftConfig, ModelConfig
from configs.schema.rewards import RewardConfig
from models.config import at_least_one
from specjax.parallel.mesh import MeshConfig
from specjax.rollout.plan import RolloutConfig
from specjax.train.adaptation import DraftTrainingConfig
from specjax.train.advantage import AdvantageConfig
from specjax.train.loss import LossConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import TrainConfig
from specjax.train.updates import UpdateConfig
from specjax.verify import VERIFIERS


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
    """Saves that a run can be resumed from: behind warm-up and distillation, on the way, and at its end.

    Attributes:
        every: steps from one to the next; 0 never saves.
        keep:  how many stay, the newest.
        best:  eval/accuracy, reward/mean, reward/accuracy, a part of the reward, or rollout/acceptance_length: of the
               saves, the one where it was highest stays too. None keeps the newest alone.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "keep")


@dataclass(frozen=True)
class LogConfig:
    """What a run keeps beside its metrics.

    Attributes:
        samples:       completions kept in full, with the lengths of all, of the first step, those that are evaluated
                       and the last; 0 keeps none.
        wandb_project: log to this project of Weights & Biases too; None does not.
    """

    samples: int = 4
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: must be at least 0")


@dataclass(frozen=True)
class SpeedupConfig:
    """The closing comparison: held-out prompts generated at every slot count and draft length, each at its best.

    Attributes:
        slots:         sequences decoded at a time on each shard, to begin with; empty skips the comparison.
        draft_lengths: K of the speculative settings.
        prompts:       in a turn, over all shards, with rollout.group_size samples each, as in a step; every turn takes
                       the next of those held out.
        repeats:       timings of the best settings of each kind, side by side.
    """

    slots: tuple[int, ...] = ()
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4)
    prompts: int = 16
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
        out:                 run directory, None takes runs/NAME or the next free number behind it; of launch.distill
                             and launch.export the directory to write, which must be given.
        resume:              continue the run in `out` (or the newest of NAME) from its last checkpoint.
        probe_every:         run every n-th step stage by stage against the clock, and the one before it by the same
                             programs; 0 never.
        print_every:         print every n-th step, and those that measured more; metrics.jsonl has them all.
        profile_step:        trace this step for a profiler, into profile/ of the run directory; 0 none. The first one
                             compiles, too, and one that is probed runs stage by stage.
        microbatches:        parts in which the gradient of an update is accumulated.
        reference_every:     the reference policy becomes the policy as it is after every n-th step; 0 leaves it fixed.
        gap_alarm:           how far the log-probs of rollout and training may lie apart, as the mean over the tokens,
                             before the log and rollout/logprob_alarm say so.
        max_skipped:         steps in a row that skip an update, of policy or draft, its loss or gradient not being
                             finite, before the run ends; 0 goes on.
        cost_table:          a cost_table.json to choose among rollout.draft_lengths by, or in launch.compare among its
                             own; None measures, at the start and at probes.
        ladder:              total lengths, ascending, to the shortest fitting of which each microbatch of sorted rows
                             is cut; empty pads every row to the full length.
        logit_chunk:         positions of each row whose logits exist at a time in training; 0 for all. Fewer need less
                             memory, and gradients are the same.
        allow_truncated_law: train although top-k, top-p, min-p or temperature 0 cut tokens out of the rollout's law.
    """

    name: str
    steps: int
    seed: int = 0
    out: str | None = None
    resume: bool = False
    probe_every: int = 20
    print_every: int = 1
    profile_step: int = 0
    microbatches: int = 1
    reference_every: int = 0
    gap_alarm: float = 0.05
    max_skipped: int = 10
    cost_table: str | None = None
    ladder: tuple[int, ...] = ()
    logit_chunk: int = 0
    allow_truncated_law: bool = False
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    updates: UpdateConfig = field(default_factory=UpdateConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    draft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    speedup: SpeedupConfig = field(default_factory=SpeedupConfig)

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "print_every")
        if self.max_skipped < 0:
            raise ValueError(f"max_skipped = {self.max_skipped}: must be at least 0")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed = {self.seed}: must be between 0 and {2**31 - 1}")
        if not 0 <= self.profile_step <= self.steps:
            raise ValueError(f"profile_step = {self.profile_step}: must be between 0 and steps = {self.steps}")
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
            selection=self.selection,
            advantage=self.advantage,
            loss=self.loss,
            updates=self.updates,
            policy_optimizer=self.policy_optimizer,
            draft_optimizer=self.draft_optimizer,
            microbatches=self.microbatches,
            reference_every=self.reference_every,
            gap_alarm=self.gap_alarm,
            ladder=self.ladder,
            logit_chunk=self.logit_chunk,
            draft_training=draft_training,
            allow_truncated_law=self.allow_truncated_law,
        )
