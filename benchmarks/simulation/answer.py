"""Answer for one point: seconds of generation and of a step, with drafts and without."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar

from benchmarks.simulation.acceptance import predict_length, tokens_per_round
from benchmarks.simulation.machine import Evidence, completion_lengths, memory, round_costs, stages
from benchmarks.simulation.point import MEASURED, MOST_SLOTS, Point
from benchmarks.simulation.rollout import SlotLayout, simulate
from benchmarks.simulation.step import StageSeconds, step_seconds
from benchmarks.simulation.surface import Surface

# Replicas are simulated until they hold so many sequences, but at least FEWEST; more of them are alike.
MOST_SEQUENCES, FEWEST = 2048, 8
# Rollouts of a step with lag, whose lengths differ.
ROLLOUTS = 3
# Phases of specjax where none are given: as in its recipes for several GPUs (configs/qwen3_8b_rl_zero.py).
SHRINKING = (1, 4, 16)
# Eighths of the GPUs that may generate.
SPLITS = range(1, 8)


class DoesNotFit(ValueError):
    """The weights of the point, its training state and its sequences need more memory than its device has."""


class Arm(NamedTuple):
    """A step in one way of decoding.

    generation, step, exposed: seconds of the rollout, of the step, and of generation that nothing hides.
    acceptance_length:         tokens per verification.
    slots, waiting:            sequences that a replica decodes together, and that wait.
    phases:                    slots that its batch shrinks to; () if rows leave as they end.
    generation_gpus:           GPUs that generate.
    """

    generation: float
    step: float
    exposed: float
    acceptance_length: float
    stages: StageSeconds
    slots: int
    phases: tuple[int, ...]
    waiting: int
    generation_gpus: int


class Answer(NamedTuple):
    """A step without drafts, and the same step with them."""

    plain: Arm
    drafted: Arm

    @property
    def generation_speedup(self) -> float:
        """How many times faster generation is."""
        return self.plain.generation / self.drafted.generation

    @property
    def step_speedup(self) -> float:
        """How many times faster the whole step is."""
        return self.plain.step / self.drafted.step


Pair = tuple[Point, Point]


def resolve_pair(point: Point, evidence: Evidence) -> Pair:
    """Return the point without drafts and the point itself, each resolved. Raises DoesNotFit."""
    plain = replace(point, draft_length=0, draft_lengths=(), draft_training=0.0)
    return resolve(plain, evidence), resolve(point, evidence)


def resolve(point: Point, evidence: Evidence) -> Point:
    """Return the point with its slots and the split of its GPUs filled in: as many as fit, and the fastest.

    Raises DoesNotFit, also for given slots or phases.
    """
    most, phases = _slots_that_fit(point), point.phases if point.engine == "specjax" else ()
    sizes = {"slots": point.slots, "phases": max(phases, default=0)}
    point = replace(point, slots=point.slots or most)
    if point.lag and not point.generation_gpus:
        replicas = point.gpus // point.replica
        counts = {max(1, min(replicas - 1, replicas * eighth // 8)) * point.replica for eighth in SPLITS}
        tried = (replace(point, generation_gpus=count) for count in sorted(counts))
        point = min(tried, key=lambda each: run(each, evidence).step)
    for name, slots in sizes.items():
        if min(slots, _sequences(point)) > most:
            raise DoesNotFit(f"{name} = {slots}: a replica has memory for {most} sequences; must be at most as many")
    return point


def answer(pair: Pair, evidence: Evidence, seed: int = 0) -> Answer:
    """Simulate both, which are resolved."""
    return Answer(run(pair[0], evidence, seed), run(pair[1], evidence, seed))


def run(point: Point, evidence: Evidence, seed: int = 0) -> Arm:
    """Simulate the step of a resolved point."""
    gpus, sequences = _generating(point), _sequences(point)
    replicas = gpus // point.replica
    # The others have one sequence less. Their last row is a placeholder of one token.
    fuller = point.sequences - (sequences - 1) * replicas
    lengths = completion_lengths(point, evidence)
    slots = min(point.slots, sequences)
    phases = _phases(point, slots)
    layout = SlotLayout(slots, phases)
    surface = Surface(round_costs(point, evidence), slots, point.prompt_tokens + point.limit_tokens, point.lengths)
    simulated = min(replicas, max(FEWEST, MOST_SEQUENCES // sequences))
    samples = list[np.ndarray]()
    for turn in range(ROLLOUTS if point.lag else 1):
        drawn = lengths.draw((simulated, sequences), seed + turn)
        drawn[max(round(simulated * fuller / replicas), 1) :, -1] = 1.0
        samples.append(drawn)
    lengths_of_all = np.concatenate(samples)
    gains = tokens_per_round(point.acceptance_length, point.measured_at, point.lengths, lengths_of_all.shape)
    # Replicas do not depend on each other, so all rollouts are simulated together.
    rollout = simulate(lengths_of_all, gains, surface, layout, point.prompt_tokens)
    seconds = [float(ended.max()) for ended in np.split(rollout.ended, len(samples))]
    tokens = point.sequences * (lengths.mean() + point.prompt_tokens)
    other_stages = stages(point, tokens, point.gpus - gpus if point.lag else gpus)
    step = step_seconds(seconds, other_stages.total, point.lag)
    return Arm(
        generation=float(np.mean(seconds)),
        step=step.seconds,
        exposed=step.exposed,
        acceptance_length=rollout.verified,
        stages=other_stages,
        slots=slots,
        phases=phases,
        waiting=sequences - slots,
        generation_gpus=gpus,
    )


def _generating(point: Point) -> int:
    """Return the GPUs that generate."""
    return (point.generation_gpus if point.lag else 0) or point.gpus


def _sequences(point: Point) -> int:
    """Return the most sequences that a replica has."""
    return -(-point.sequences * point.replica // _generating(point))


def _phases(point: Point, slots: int) -> tuple[int, ...]:
    """Return the slots that the batch shrinks to, its first ones included; () if rows leave as they end."""
    if point.engine != "specjax":
        return ()
    sizes = point.phases or [max(slots // divisor, 1) for divisor in SHRINKING]
    return tuple(sorted({slots, *(min(size, slots) for size in sizes)}, reverse=True))


def break_even(pair: Pair, evidence: Evidence, seed: int = 0) -> float:
    """Return the acceptance length from which a step with drafts is no slower; inf if no acceptance reaches that."""
    return _least_acceptance(pair[1], evidence, run(pair[0], evidence, seed).step, seed)


def worth_of_training(pair: Pair, evidence: Evidence, seed: int = 0) -> float:
    """Return by how much training the draft must raise the acceptance length so that it pays for itself.

    inf if no acceptance does. The draft without training is not trained in the step.
    """
    untrained = run(replace(pair[1], draft_training=0.0), evidence, seed)
    least = _least_acceptance(pair[1], evidence, untrained.step, seed)
    return max(least - pair[1].acceptance_length, 0.0)


def _least_acceptance(point: Point, evidence: Evidence, step: float, seed: int) -> float:
    # In the inverse of the length, in which the seconds of a rollout at a fixed draft length are almost linear.
    def excess(inverse: float) -> float:
        length = min(1 / inverse, point.measured_at + 1.0)
        return run(replace(point, acceptance_length=length), evidence, seed).step - step

    least = 1 / (point.measured_at + 1.0)
    if excess(least) > 0:
        return math.inf
    return 1.0 if excess(1.0) <= 0 else 1 / root_scalar(excess, bracket=(least, 1.0), xtol=1e-4).root


def accepted(point: Point, draft_lengths: Sequence[int]) -> list[float]:
    """Return the acceptance length that the point's acceptance gives at each draft length."""
    return [predict_length(point.acceptance_length, point.measured_at, k) for k in draft_lengths]


def _slots_that_fit(point: Point) -> int:
    """Return the sequences of a replica whose caches fit in memory; measured rounds were of a batch that did."""
    if point.hardware == MEASURED:
        return max(point.sequences, point.slots, *point.phases)
    needs = memory(point, point.prompt_tokens + point.mean_tokens)
    if needs.slots < 1:
        least, device = (needs.fixed + needs.sequence) / 1e9, needs.device / 1e9
        raise DoesNotFit(
            f"tensor = {point.tensor}: weights, training state ({needs.training / 1e9:.0f} GB) and one sequence take "
            f"{least:.0f} GB of a device's {device:.0f}; must be more, or a larger expert, more gpus or fewer "
            "limit_tokens"
        )
    return min(needs.slots, MOST_SLOTS)
