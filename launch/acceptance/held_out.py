"""Acceptance of a draft on held-out prompts: measured in rollouts, and predicted from its overlap with the policy."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.acceptance.counts import DraftCounts, DraftRecords, count_drafts, length_buckets
from launch.data.batches import fixed_batches, prompts_per_batch
from launch.data.responses import Answers, answers_of, join_answers
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel import processes
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.train.batch import Sequences
from specjax.train.draft.distill import make_predict
from specjax.types import Params

# Replaces temperature 0 when the overlap is predicted, because `full_log_probs` does not support 0. At this temperature
# almost all mass is on the likeliest token.
NEARLY_GREEDY = 1e-4


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Acceptance on held-out prompts at one temperature.

    Attributes:
        temperature:  sampling temperature.
        draft_length: draft length of every round, the run's longest. Shorter drafts have the same rates per position.
        predicted:    mean overlap, sum_v min(p, q), over the same answers; compare it with the rate of position 1.
                      None if the law truncates, because p and q include the temperature but no truncation.
        untrained:    predicted acceptance of the draft before training; None if not measured.
        counts:       counts over all sequences.
        by_length:    counts by bucket of answer length; the key is the largest length in the bucket.
    """

    temperature: float
    draft_length: int
    predicted: float | None
    untrained: float | None
    counts: DraftCounts
    by_length: dict[int, DraftCounts]

    def to_json(self) -> dict[str, Any]:
        """Return a flat object: fields of `counts` on the top level, `by_length` as a list of objects with `up_to`."""
        fields = asdict(self)
        counts, by_length = fields.pop("counts"), fields.pop("by_length")
        return fields | counts | {"by_length": [{"up_to": length} | bucket for length, bucket in by_length.items()]}

    def made_for(self, policy: str | None, decoder: DecoderConfig | None) -> MadeFor | None:
        """Return the record of the policy that the draft was distilled for, with the predicted acceptance.

        Returns None for a custom family, which made_for.json cannot describe.

        policy:  directory of the policy, or of the run that trained it.
        decoder: shape of the policy; None for a custom family.
        """
        if decoder is None:
            return None
        # At temperature 0 a run predicts acceptance from the distributions at temperature 1, so the two are not
        # comparable.
        predicted = self.predicted if self.temperature > 0 else None
        return MadeFor(policy, decoder.hidden_size, decoder.num_layers, self.temperature, predicted)


def at_longest(rollout: RolloutConfig) -> RolloutConfig:
    """Return the options with the run's longest draft length in every round."""
    return replace(rollout, draft_length=max(rollout.lengths), draft_lengths=())


def check_counts(experiment: Experiment) -> None:
    """Raise ConfigError if a custom rollout function does not return the counts needed to measure acceptance."""
    config = experiment.config
    if (name := config.rollout.function) is None:
        return
    traced = trace_rollout(experiment, at_longest(config.rollout), config.data.prompts, experiment.mesh)
    if traced.row_rounds is None or traced.drafted is None or traced.accepted is None:
        raise ConfigError(
            f"rollout.function = {name}: must return row_rounds, drafted and accepted, to measure acceptance"
        )


class AcceptanceMeter:
    """Meter of a draft's acceptance on held-out prompts at one temperature, at the run's longest draft length.

    The constructor starts to compile its programs, so that several temperatures compile side by side.
    """

    def __init__(self, experiment: Experiment, drafter: Drafter, params: Params, temperature: float) -> None:
        config, policy, mesh = experiment.config, experiment.networks.policy, experiment.mesh
        self._temperature, self._law = temperature, replace(config.rollout.law, temperature=temperature)
        self._config, self._params = config, params
        self._options = replace(at_longest(config.rollout), law=self._law, group_size=config.eval.samples)
        table = experiment.held_out_prompts.first(config.eval.prompts)
        # About as many sequences at a time as in a step, because memory grows with them.
        size = prompts_per_batch(experiment.sequences, self._options.group_size, len(table.rows), mesh)
        self._batches = fixed_batches(table, size)
        self._generate = make_generate(policy, drafter, self._options, mesh, experiment.rollout_fn)
        self._generate.start_compiling(params, self._batches[0])
        predicted_law = replace(self._law, temperature=temperature or NEARLY_GREEDY)
        passes = {"microbatches": config.distill.microbatches, "logit_chunk": config.logit_chunk}
        self._predict = make_predict(policy, drafter, predicted_law, mesh, **passes)
        # At temperature 0 all mass is on the likeliest token, which truncation keeps.
        self._predicts = not self._law.truncates or temperature == 0
        if self._predicts:
            rows = config.distill.batch_size, self._batches[0].tokens.shape[1] + self._options.max_new_tokens
            tokens, completion = (jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.int32, jnp.bool_))
            self._predict.start_compiling(params, Sequences(tokens, completion))  # pyright: ignore[reportArgumentType]

    def measure(self, untrained: Params | None = None) -> HeldOutAcceptance:
        """Generate completions and return their acceptance. Raises Stopped at a signal.

        untrained:   parameters before training. Their predicted acceptance on the same answers is returned too.
        """
        with long_phase(f"acceptance at temperature {self._temperature}", len(self._batches), "batches") as phase:
            saved = phase.restore("records"), phase.restore("answers")
            records = [] if saved[0] is None else [DraftRecords(**saved[0])]
            answered = [] if saved[1] is None else [Answers(**saved[1])]
            for prompts in self._batches[phase.done :]:
                # Step -1 keys the noise of evaluation; training steps are not negative.
                rollout = self._generate(self._params, prompts, seed_step(self._config.seed, -1))
                records.append(DraftRecords.of(rollout, np.repeat(prompts.id >= 0, self._options.group_size)))
                answered.append(answers_of(prompts, rollout))
                state = {"records": DraftRecords.join(records)._asdict(), "answers": vars(join_answers(answered))}
                phase.finish(state, tokens=int(np.sum(rollout.lengths)))
        completed, answers = DraftRecords.join(records), join_answers(answered)
        predicted = self._predicted(self._params, answers, "after training")
        before = None
        if untrained is not None:
            before = self._predicted(untrained, answers, "before training")
        buckets = length_buckets(completed.lengths)
        return HeldOutAcceptance(
            temperature=self._temperature,
            draft_length=self._options.draft_length,
            predicted=predicted,
            untrained=before,
            counts=count_drafts(completed),
            by_length={int(length): count_drafts(completed.select(buckets == length)) for length in np.unique(buckets)},
        )

    def _predicted(self, params: Params, answers: Answers, which: str) -> float | None:
        if not self._predicts:
            return None
        batches = list(answers.in_batches(self._config.distill.batch_size))
        name = f"overlap at temperature {self._temperature} {which}"
        with long_phase(name, len(batches), "batches") as phase:
            saved = phase.restore("sums")
            sums = np.zeros(2, np.float32) if saved is None else saved["sums"]
            for batch in batches[phase.done :]:
                sums = sums + np.stack(processes.fetch(self._predict(params, batch)))
                phase.finish({"sums": {"sums": sums}}, tokens=int(np.sum(batch.completion)))
        return float(sums[0] / sums[1])
