"""Acceptance of a draft on held-out prompts: measured in rollouts, and predicted from its overlap."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.data.batches import fixed_batches
from launch.data.responses import answers_of
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import make_generate
from specjax.train.distill import make_predict
from specjax.types import Params, Rollout

SHORTEST_BUCKET = 16
# Stands for 0 where an overlap is predicted, since `full_log_probs` has no temperature 0: the mass is all in one place.
NEARLY_GREEDY = 1e-4


@dataclass(frozen=True)
class DraftCounts:
    """Drafted and accepted tokens of some sequences, in rounds in which they were live.

    tokens:   emitted by verification: all but the first of each sequence, which comes from its prefill.
    rounds:   verifications. ended: those whose last token was an accepted one of the draft's, which ended the sequence.
    drafted:  [K], how often position i of a draft could still be emitted. accepted: [K], how often it was.
    alpha:    tokens a round, 1 + (sum of accepted - ended) / rounds; None without a round.
    rates:    [K], accepted over drafted, whatever became of earlier positions; None where nothing was drafted.
    """

    sequences: int
    tokens: int
    rounds: int
    ended: int
    drafted: list[int]
    accepted: list[int]
    alpha: float | None
    rates: list[float | None]


@dataclass(frozen=True)
class HeldOutAcceptance:
    """The acceptance at one temperature: over all sequences, and by the length of their answers, in buckets.

    draft_length: of the rounds, the longest of the run's: each position of a shorter draft is accepted alike.
    predicted: the mean of sum_v min(p, q) over the same answers, which position 1 is held against; None where the law
               cuts tokens out, of which these p and q do not tell.
    untrained: the same of the draft as it was to begin with, where asked for.
    """

    temperature: float
    draft_length: int
    predicted: float | None
    untrained: float | None
    counts: DraftCounts
    by_length: dict[int, DraftCounts]

    def to_json(self) -> dict[str, Any]:
        """Return the counts of all sequences beside the other fields, those by length as a list."""
        found = asdict(self)
        counts, by_length = found.pop("counts"), found.pop("by_length")
        return found | counts | {"by_length": [{"up_to": length} | part for length, part in by_length.items()]}


def check_counts(experiment: Experiment) -> None:
    """Raise ConfigError where the rollout function returns no counts to measure acceptance by."""
    if (name := experiment.config.rollout.function) is None:
        return
    rollout = experiment.config.rollout
    options = replace(rollout, draft_length=max(rollout.lengths), draft_lengths=())
    done = experiment.trace_rollout(options, experiment.config.data.prompts)
    if done.row_rounds is None or done.drafted is None or done.accepted is None:
        raise ConfigError(f"rollout.function = {name}: must return row_rounds, drafted and accepted to be measured")


def measure_acceptance(
    experiment: Experiment, drafter: Drafter, params: Params, temperature: float, untrained: Params | None = None
) -> HeldOutAcceptance:
    """Generate held-out prompts at the run's longest draft length, and count drafted and accepted tokens."""
    config, policy, mesh = experiment.config, experiment.networks.policy, experiment.mesh
    rollout = experiment.config.rollout
    law = replace(rollout.law, temperature=temperature)
    options = replace(
        rollout, law=law, group_size=config.eval.samples, draft_length=max(rollout.lengths), draft_lengths=()
    )
    table = experiment.held_out_prompts
    size, shards = min(config.eval.prompts, len(table.rows)), batch_shards(mesh)
    (prompts,) = fixed_batches(table.first(size), -(-size // shards) * shards)
    # The noise of evaluation, which no training step uses.
    generate = make_generate(policy, drafter, options, mesh, experiment.rollout_fn)
    done = generate(params, prompts, seed_step(config.seed, -1))
    answers = answers_of(prompts, done)

    microbatches, rows = config.distill.microbatches, config.distill.batch_size
    smooth = replace(law, temperature=temperature or NEARLY_GREEDY)
    predict = make_predict(policy, drafter, smooth, mesh, microbatches=microbatches, logit_chunk=config.logit_chunk)

    def predicted(params: Params) -> float | None:
        # At temperature 0 the likeliest token is all there is, and nothing cuts it out.
        if law.truncates and temperature > 0:
            return None
        sums = np.sum([predict(params, batch) for batch in answers.in_batches(rows)], axis=0)
        return float(sums[0] / sums[1])

    real = np.repeat(prompts.id >= 0, options.group_size)
    buckets = length_buckets(np.asarray(done.lengths))
    return HeldOutAcceptance(
        temperature=temperature,
        draft_length=options.draft_length,
        predicted=predicted(params),
        untrained=None if untrained is None else predicted(untrained),
        counts=count_drafts(done, real),
        by_length={int(length): count_drafts(done, real & (buckets == length)) for length in np.unique(buckets[real])},
    )


def count_drafts(rollout: Rollout, which: np.ndarray) -> DraftCounts:
    """Count the rows `which`, bool [R], of a rollout that recorded its drafts."""
    lengths, rounds, drafted, accepted = (
        np.asarray(x)[which] for x in (rollout.lengths, rollout.row_rounds, rollout.drafted, rollout.accepted)
    )
    tokens, total = int(lengths.sum() - len(lengths)), int(rounds.sum())
    counts = list(zip(accepted.sum(axis=0).tolist(), drafted.sum(axis=0).tolist(), strict=True))
    return DraftCounts(
        sequences=len(lengths),
        tokens=tokens,
        rounds=total,
        ended=int(accepted.sum()) + total - tokens,
        drafted=[d for _, d in counts],
        accepted=[a for a, _ in counts],
        alpha=tokens / total if total else None,
        rates=[a / d if d else None for a, d in counts],
    )


def length_buckets(lengths: np.ndarray) -> np.ndarray:
    """Return the bucket of each answer, named by the most tokens that it holds: 16, 32, 64, .."""
    return np.array([max(SHORTEST_BUCKET, 2 ** math.ceil(math.log2(max(length, 1)))) for length in lengths.tolist()])
