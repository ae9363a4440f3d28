"""Functions and options that the losses of both networks share."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.drafters import Drafter
from specjax.drafters.base import Anchors
from specjax.log_probs import laws, teacher_forced
from specjax.sampling import SamplingLaw
from specjax.shared_prompts import SharedPrompts, shared_prompts
from specjax.train.batch import ScoredSequences, Sequences
from specjax.train.draft.anchors import draw_anchors, every_anchor
from specjax.train.hints import HintTemplate, with_hints
from specjax.train.loss import LossConfig, LossFn, policy_loss
from specjax.train.teacher import Compared, TeacherConfig, compare
from specjax.types import Policy, PolicyOutput, PyTree
from specjax.verify import Verifier, VerifierName


@dataclass(frozen=True)
class LossContext:
    """Functions and options that both losses share.

    Attributes:
        law:          the rollout's.
        loss:         options of `loss_fn`.
        loss_fn:      the policy's loss.
        verifier:     the rollout's, which tells how many drafted tokens should have been accepted.
        microbatches: parts in which a gradient is accumulated; any number gives the same.
        ladder:       windows that a microbatch may be cut to (specjax.train.ladder); any gives the same gradient.
        budget:       the most tokens that a completion may have; None for as many as a row.
        logit_chunk:  as in `TrainConfig`.
        train_draft:  False: the draft's loss is only measured, and its gradient is zero.
        anchors:      completion tokens of each row at which the draft learns; 0 for all.
        samples:      successive rows that begin with the same prompt, which the policy computes once. Above 1, with a
                      budget and without a ladder.
        teacher:      the teacher's network; None without one.
        distillation: options of learning from it.
        hint_template: where hints stand in the prompts of its rows; None without.
        stop_tokens:  tokens that end a completion.
    """

    policy: Policy
    drafter: Drafter
    law: SamplingLaw
    loss: LossConfig = LossConfig()
    loss_fn: LossFn = policy_loss
    verifier: VerifierName | Verifier = "rejection"
    microbatches: int = 1
    ladder: tuple[int, ...] = ()
    budget: int | None = None
    logit_chunk: int | None = None
    train_draft: bool = True
    anchors: int = 0
    samples: int = 1
    teacher: Policy | None = None
    distillation: TeacherConfig = TeacherConfig()
    hint_template: HintTemplate | None = None
    stop_tokens: tuple[int, ...] = ()

    def forward(self, weights: PyTree, sequences: Sequences) -> PolicyOutput:
        """Run the policy over whole rows."""
        routes = sequences.routes if self.loss.routing == "replay" else None
        shared = self._shared(self.policy, sequences)
        return teacher_forced(self.policy, weights, sequences.tokens, self.logit_chunk, routes, shared)

    def compare(
        self, weights: PyTree, output: PolicyOutput, teacher: PyTree, rows: ScoredSequences, place: Int[Array, "R N"]
    ) -> Compared:
        """Run the teacher over whole rows, and compare the policy with it at the tokens at `place`.

        output: of the policy with these weights. teacher: the teacher's; None: the same weights.
        """
        frozen = jax.lax.stop_gradient(weights if teacher is None else teacher)
        forward, longer = self.teacher_forward(frozen, rows)
        both = laws(weights, output, self.law), laws(frozen, forward, self.law)
        return compare(*both, rows.tokens, place, self.distillation, longer)

    def teacher_forward(
        self, weights: PyTree, sequences: ScoredSequences
    ) -> tuple[PolicyOutput, Int[Array, "R"] | None]:
        """Run the teacher over whole rows, with hints in their prompts. Return by how many tokens these are longer."""
        assert self.teacher is not None
        run = partial(teacher_forced, self.teacher, weights, logit_chunk=self.logit_chunk)
        if self.hint_template is None or sequences.hints is None:
            return run(sequences.tokens, shared=self._shared(self.teacher, sequences)), None
        starts = jnp.argmax(sequences.completion, axis=1).astype(jnp.int32)
        tokens, longer = with_hints(sequences.tokens, starts, sequences.hints, self.hint_template)
        return run(tokens), longer

    def _shared(self, policy: Policy, sequences: Sequences) -> SharedPrompts | None:
        if self.samples == 1 or not policy.packs:
            return None
        assert self.budget is not None and not self.ladder
        return shared_prompts(sequences.completion, self.budget, self.samples)

    def anchors_of(self, sequences: Sequences) -> Anchors:
        """Draw the anchors of rows that have keys, or return all completion tokens if none are to be drawn."""
        if not self.anchors:
            return every_anchor(sequences.places(self.budget), sequences.completion)
        if sequences.keys is None:
            raise ValueError(f"anchors = {self.anchors}: the sequences have no keys to draw them with")
        return draw_anchors(sequences.keys, sequences.completion, self.anchors)
