"""Options of one training step, and the checks of their combinations."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from specjax.drafters import Drafter
from specjax.options import MOST, Factor, NonNegative, Options, Positive, at_least, at_most
from specjax.rollout.plan import RolloutConfig
from specjax.shared_prompts import samples_that_share
from specjax.train.advantage import AdvantageConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.ladder import check_ladder
from specjax.train.loss import LossConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.selection import SelectionConfig
from specjax.train.teacher import TeacherConfig
from specjax.train.updates import UpdateConfig
from specjax.types import Policy


@dataclass(frozen=True)
class TrainConfig(Options):
    """One step of training: rollout, rewards, advantages, and the updates of both networks.

    Attributes:
        seed:                Seed of all noise.
        rollout:             How completions are generated.
        selection:           Which of them are trained on.
        advantage:           Rewards to advantages.
        loss:                The policy's loss.
        teacher:             Distillation from a teacher.
        policy_optimizer:    Optimiser of the policy.
        draft_optimizer:     Optimiser of the draft.
        updates:             Updates per rollout.
        microbatches:        Microbatches per update; the gradient is the same. A recipe's number falls to one that
                             divides the batch, a given one must divide it.
        reference_every:     Steps between updates of the reference policy; 0: fixed.
        gap_alarm:           Log-prob gap that alarms; of a sequence, 10 times it. None: only NaN does.
        ladder:              Sequence-length buckets, ascending. Rows are sorted, and each microbatch is cut to the
                             smallest bucket that fits. Empty: the full length alone.
        logit_chunk:         Logits at a time, in positions of a row. 0: all, None: 2 GiB.
        draft_training:      When the draft is trained.
        allow_truncated_law: Train although top-k, top-p, min-p or temperature 0 truncate the rollout's distribution.
    """

    seed: NonNegative = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    draft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))
    updates: UpdateConfig = field(default_factory=UpdateConfig)
    microbatches: Positive = 1
    reference_every: NonNegative = 0
    gap_alarm: Factor | None = 0.05
    # A draft predicts from the third token on.
    ladder: tuple[Annotated[int, at_least(3), at_most(MOST)], ...] = ()
    logit_chunk: NonNegative | None = None
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    allow_truncated_law: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        loss, updates = self.loss, self.updates
        if self.reference_every and not loss.kl_coefficient:
            raise ValueError(f"reference_every = {self.reference_every}: must be 0 without a kl_coefficient")
        if updates.recompute_old and not updates.several:
            raise ValueError("recompute_old = True: must be False with one update, whose own forward anchors the ratio")
        if updates.several and not updates.recompute_old and loss.importance != "token":
            raise ValueError(
                f"importance = {loss.importance}: with several updates old / mu is 1, unless recompute_old = True"
            )
        whole_batch = AdvantageConfig(baseline="batch", scale="batch")
        if loss.kl_in == "token" and self.advantage != whole_batch:
            raise ValueError("kl_in = token: must go with advantage.baseline = batch and advantage.scale = batch")
        if loss.in_reward and self.advantage.scale == "group":
            raise ValueError(
                "kl_in = reward: must go with advantage.scale = batch or none; over the deviation of a group of equal "
                "rewards KL would be all that counts, whatever its coefficient"
            )
        if self.selection.overlong_buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"overlong_buffer = {self.selection.overlong_buffer}: must be at most the length budget, "
                f"max_new_tokens = {self.rollout.max_new_tokens}"
            )
        if self.rollout.carry_over is not None and loss.routing == "replay":
            raise ValueError("routing = replay: must be recompute with carry_over, which does not carry routes over")
        check_ladder(self.ladder)
        if self.teacher.form != "exact" and loss.ratio == "sequence":
            raise ValueError(f"teacher.form = {self.teacher.form}: must be exact with loss.ratio = sequence")
        if self.teacher.hint == "group" and self.rollout.group_size == 1:
            raise ValueError("teacher.hint = group: must be another with rollout.group_size = 1")
        for name, value, allowed in (("ladder", self.ladder, ()), ("carry_over", self.rollout.carry_over, None)):
            if self.teacher.hint != "none" and value != allowed:
                raise ValueError(f"{name} = {value}: must be {allowed} with teacher.hint = {self.teacher.hint}")
        if self.rollout.law.truncates and not self.allow_truncated_law:
            raise ValueError(
                f"rollout.law = {self.rollout.law}: cuts tokens out of the law that training assumes; "
                "allowed only with allow_truncated_law"
            )

    def trained_groups(self, prompts: int) -> int:
        """Return the most groups that a step of so many prompts trains on."""
        return self.selection.groups or self.rollout.finished_groups(prompts)

    def sharing(self, policy: Policy, rows: int, prompt: int) -> int:
        """Return how many successive rows of a microbatch pass the policy with one prompt (specjax.shared_prompts).

        rows: rows of a data shard's microbatch. prompt: tokens to which prompts are padded.
        """
        # A minibatch takes every n-th row, and a ladder sorts single rows.
        group, rest = divmod(self.rollout.group_size, self.updates.minibatches)
        if rest or self.ladder or not policy.packs:
            return 1
        return samples_that_share(prompt, self.rollout.max_new_tokens, math.gcd(rows, group))


def check_groups(config: TrainConfig) -> None:
    """Raise ValueError if a reward has no other of its group to be compared with: all advantages would be 0."""
    size, baseline = config.rollout.group_size, config.advantage.baseline
    if size == 1 and baseline != "batch" and config.teacher.learns_from_rewards:
        raise ValueError(
            f"rollout.group_size = {size}: must be at least 2 with advantage.baseline = {baseline}; a sample that is "
            "alone in its group has advantage 0"
        )


def check_carry_over(config: RolloutConfig, drafter: Drafter) -> None:
    """Raise ValueError for a drafter that keeps completions, which carry-over would give it in parts."""
    if config.carry_over is not None and drafter.memory is not None:
        raise ValueError(
            f"rollout.carry_over = {config.carry_over}: must be None with a history lookup, which keeps completions"
        )


def check_mixture(config: TrainConfig, policy: Policy) -> None:
    """Raise ValueError for options of a mixture of experts if the policy has none."""
    if policy.mixture is not None:
        return
    for name in ("router_aux_loss_coef", "routing"):
        value, default = getattr(config.loss, name), getattr(LossConfig(), name)
        if value != default:
            raise ValueError(f"loss.{name} = {value}: must be {default}; the policy has no mixture of experts")
