"""The configuration of a whole run."""

from dataclasses import dataclass, field

from configs.schema.asynchronous import AsynchronousConfig
from configs.schema.before_rl import DistillConfig, WarmupConfig
from configs.schema.data import DataConfig
from configs.schema.drafts import DraftConfig
from configs.schema.environments import EnvironmentConfig
from configs.schema.functions import LossOptions, RolloutOptions
from configs.schema.hosts import HostsConfig
from configs.schema.model import ModelConfig
from configs.schema.records import CheckpointConfig, EvalConfig, LogConfig, SpeedupConfig
from configs.schema.rewards import ENVIRONMENT, NO_REWARD, RewardConfig
from configs.schema.teacher import TeacherOptions
from models.lora import LoraConfig
from specjax.options import NonNegative, Positive
from specjax.parallel.mesh import MeshConfig
from specjax.train.config import TrainConfig
from specjax.verify import VERIFIERS


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """Seed, number of steps, directory and memory.

    The other sections of a run are fields of this class. A `RunConfig` is a `TrainConfig`.

    Attributes:
        name:         Name of the recipe.
        steps:        Total number of RL steps.
        out:          Run directory. None, in launch.train: runs/NAME, or runs/NAME-2, -3, .. if taken.
        resume:       Continue the run in `out`, or else the newest of this recipe, from its last checkpoint.
        probe_every:  Time the stages of every n-th step (a probe); 0: never. Asynchronous runs have none.
        print_every:  Print averages over every n steps. metrics.jsonl has each step.
        profile_step: Step to trace with the profiler, into profile/; 0: none.
        max_skipped:  Stop after so many skipped updates in a row, of a loss or gradient not finite; 0: never.
        cost_table:   cost_table.json to choose draft lengths by. None: measure one.
    """

    name: str
    steps: Positive
    out: str | None = None
    resume: bool = False
    probe_every: NonNegative = 20
    print_every: Positive = 1
    profile_step: NonNegative = 0
    max_skipped: NonNegative = 10
    cost_table: str | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    speedup: SpeedupConfig = field(default_factory=SpeedupConfig)

    def __post_init__(self) -> None:
        for name, kind in (("rollout", RolloutOptions), ("loss", LossOptions), ("teacher", TeacherOptions)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} = {getattr(self, name)}: must be {kind.__name__} of configs.schema")
        super().__post_init__()
        if self.profile_step > self.steps:
            raise ValueError(f"profile_step = {self.profile_step}: must be at most steps = {self.steps}")
        lag = self.asynchronous.lag
        if lag and lag >= self.steps:
            raise ValueError(f"asynchronous.lag = {lag}: must be less than steps = {self.steps}")
        self._check_undrafted()
        self._check_environment()
        self._check_teacher()
        if self.lora.enabled:
            self._check_lora()
        if self.rollout.verifier not in VERIFIERS:
            raise ValueError(f"rollout.verifier: must be one of {', '.join(VERIFIERS)} in a recipe, to be written down")

    def _check_undrafted(self) -> None:
        """Raise ValueError for options that have no meaning without a draft."""
        if not self.draft.proposes and max(self.rollout.lengths):
            lengths = self.rollout.draft_lengths
            name, value = ("draft_lengths", lengths) if lengths else ("draft_length", self.rollout.draft_length)
            raise ValueError(f"rollout.{name} = {value}: must be {(0,) if lengths else 0} with draft.kind none")

    def _check_environment(self) -> None:
        """Raise ValueError for options that have no meaning with an environment, or without one."""
        rollout = self.rollout
        if not self.environment.names:
            if rollout.environment is not None:
                raise ValueError("rollout.environment: must be None in a recipe; environment.function names one")
            if self.reward.scorer == ENVIRONMENT:
                raise ValueError("reward.scorer = environment: needs environment.function")
            if rollout.turn_tokens is not None:
                raise ValueError(f"rollout.turn_tokens = {rollout.turn_tokens}: must be None without an environment")
            return
        if self.reward.scorer == ENVIRONMENT and self.environment.tools:
            raise ValueError(
                "reward.scorer = environment: must be another with environment.tools, which give no reward"
            )
        for name, value in (
            ("rollout.carry_over", rollout.carry_over),
            ("rollout.function", rollout.function),
        ):
            if value is not None:
                raise ValueError(f"{name} = {value}: must be None with an environment")

    def _check_teacher(self) -> None:
        """Raise ValueError for a teacher that cannot be, and for a run that learns from neither teacher nor rewards."""
        teacher = self.teacher
        if teacher.kind == "base" and not self.lora.enabled:
            raise ValueError("teacher.kind = base: must be network without lora; adapters can be left out, no weights")
        if teacher.kind != "none" and not (teacher.rewards or teacher.weight):
            raise ValueError(f"teacher.weight = {teacher.weight}: must be above 0 with teacher.rewards = False")
        if self.reward.scorer != NO_REWARD:
            return
        if not teacher.learns_from_teacher:
            raise ValueError("reward.scorer = none: must be a scorer without a teacher to learn from")
        for name, value, allowed in (
            ("eval.every", self.eval.every, 0),
            ("selection.groups", self.selection.groups, 0),
            ("reward.thinking", self.reward.thinking, ()),
            ("teacher.rewards", teacher.rewards, False),
        ):
            if value != allowed:
                raise ValueError(f"{name} = {value}: must be {allowed} with reward.scorer none")
        if teacher.hint == "group":
            raise ValueError("teacher.hint = group: must be another with reward.scorer none; no completion is correct")

    def _check_lora(self) -> None:
        """Raise ValueError for options that have no meaning with adapters."""
        for name, value, allowed in (
            ("model.family", self.model.family, None),
            ("reference_every", self.reference_every, 0),
            ("policy_optimizer.kind", self.policy_optimizer.kind, "adamw"),
            ("warmup.optimizer.kind", self.warmup.optimizer.kind, "adamw"),
            ("model.rollout_dtype", self.model.rollout_dtype if self.lora.base_dtype else None, None),
        ):
            if value != allowed:
                raise ValueError(f"{name} = {value}: must be {allowed} with {self.lora.named}")
        if self.warmup.steps and self.loss.kl_coefficient:
            raise ValueError(
                f"warmup.steps = {self.warmup.steps}: must be 0 with {self.lora.named} and loss.kl_coefficient, whose "
                "reference would be the policy before it"
            )
