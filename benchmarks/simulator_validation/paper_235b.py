"""The paper's projections for Qwen3-235B-A22B on 512 and 2,048 GB200, from two constants and sheets only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.acceptance import tokens_per_round
from benchmarks.simulation.lengths import with_mean
from benchmarks.simulation.rollout import SlotLayout, simulate
from benchmarks.simulation.surface import Surface
from benchmarks.simulator_validation.cells import Figure, Kind, PageSection
from launch.comparison.stage_times import step_speedup
from models.published import DECODERS, eagle3_config
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import Deployment, cost_model, find_engine, find_hardware

MODEL = "qwen3-235b-a22b"
# (GPUs, draft length, acceptance length) -> (speed-up of generation, of a step)
POINTS = {
    (512, 3, 3.0): (2.72, 1.70),
    (512, 7, 5.0): (4.07, 1.96),
    (512, 7, 8.0): (6.49, 2.22),
    (2048, 5, 4.0): (3.5, 2.5),
}
# NeMo RL's own recipe for the model: limit and mean of its lengths; the paper: rows of a step.
ROWS, LIMIT, MEAN, SPREAD, PROMPT = 4096, 8192, 5671.0, 0.4, 300
# Tokens per second and GPU in training (Megatron-Bridge 25.09 on GB200). A log-prob stage takes from a quarter of that
# time to 0.6 (the paper's 8B runs: 18.1 of 30.5 seconds).
TRAINED, LOGPROB = 4452.0, (0.25, 0.6)
# Replicas that are simulated; the others are alike.
REPLICAS = 64
COUNTS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Sharding:
    """How the policy may be spread; weights and caches in 8 bits. layer: seconds of latency of a layer."""

    name: str
    tensor: int
    expert: int
    draft_tensor: int
    layer: float

    def rollout(self, gpus: int, draft_length: int, acceptance: float) -> float:
        """Return the seconds of a rollout."""
        deployment = Deployment(
            tensor=self.tensor, expert=self.expert, draft_tensor=self.draft_tensor, weight_bytes=1, cache_bytes=1
        )
        engine = replace(find_engine("specjax"), layer=self.layer)
        policy, draft = decoder_sheet(DECODERS[MODEL]), eagle3_sheet(eagle3_config(MODEL))
        model = cost_model(policy, draft, find_hardware("gb200"), deployment, engine=engine)
        replicas = gpus // self.tensor
        rows = ROWS // replicas
        lengths = with_mean(MEAN, SPREAD, LIMIT).draw((min(replicas, REPLICAS), rows), 0)
        gains = tokens_per_round(acceptance, max(draft_length, 1), (draft_length,), lengths)
        surface = Surface(model.seconds, rows, PROMPT + LIMIT, (draft_length,))
        return simulate(lengths, gains, surface, SlotLayout(rows), PROMPT).seconds

    def speedup(self, gpus: int, draft_length: int, acceptance: float) -> float:
        """Return the speed-up of generation."""
        return self.rollout(gpus, 0, 1.0) / self.rollout(gpus, draft_length, acceptance)

    def share(self, gpus: int, logprob: float) -> float:
        """Return the share of generation in a step without drafts. logprob: of the time of training."""
        generation = self.rollout(gpus, 0, 1.0)
        train = ROWS * (MEAN + PROMPT) / gpus / TRAINED
        return generation / (generation + train * (1 + logprob))


SHARDINGS = (
    Sharding("attention data-parallel, experts over 64, 30 us a layer", 1, 64, 1, 30e-6),
    Sharding("attention data-parallel, experts over 64, 15 us a layer", 1, 64, 1, 15e-6),
    Sharding("tensor 8, experts over 8, draft tensor 8, 30 us", 8, 8, 8, 30e-6),
    Sharding("tensor 8, experts over 8, draft tensor 1, 15 us", 8, 8, 1, 15e-6),
    Sharding("tensor 8, experts over 64, draft tensor 1, 15 us", 8, 64, 1, 15e-6),
    Sharding("tensor 16, experts over 16, draft tensor 1, 15 us", 16, 16, 1, 15e-6),
)


def two_constants() -> PageSection:
    """Return the cells of a round that costs 1 + b k, and of one share of generation."""
    (_, k, acceptance), (rollout, step) = next(iter(POINTS.items()))
    slope = (acceptance / rollout - 1) / k
    share = (1 - 1 / step) / (1 - 1 / rollout)
    cells: list[Figure] = []
    for number, ((gpus, k, acceptance), published) in enumerate(POINTS.items()):
        full = acceptance == k + 1
        kind: Kind = "fitted" if not number else "assumed" if full else "predicted"
        why = "full acceptance at k = 7" if full else ""
        speedup = acceptance / (1 + slope * k)
        name = f"{gpus:,} GPUs, k = {k}, acceptance length {acceptance:g}"
        bound = 0.07 if number else None
        cells.append(Figure(f"{name}: generation", published[0], speedup, kind, bound, why=why))
        if gpus == 512:
            cells.append(Figure(f"{name}: step", published[1], step_speedup(share, speedup), kind, bound, why=why))
            continue
        for efficiency in (1.0, 0.8, 0.6):
            # Rounds are as long with a quarter of the rows; the other stages take a quarter of the time, or more.
            later = share / (share + (1 - share) * 512 / gpus / efficiency)
            why = f"the other stages scale with efficiency {efficiency:.0%}; the lag of 2 is not computed"
            cells.append(Figure(f"{name}: step", published[1], step_speedup(later, speedup), "assumed", 0.07, why=why))
    notes = [
        f"A round costs 1 + {slope:.4f} k rounds without drafts, and generation is {share:.3f} of a step; both from "
        "the first point. The third point is the best cell of a heat map whose axes were not published; it is taken as "
        "full acceptance at k = 7. The paper gives the fourth point as approximate, at lag 2. The model does not "
        "compute that lag: stages are added as if nothing overlapped, so that agreement says nothing about asynchrony."
    ]
    return PageSection("235B: two constants", "arXiv 2604.26779, projections", notes, cells)


def sheets_alone() -> PageSection:
    """Return the cells of the sharding that is nearest to the paper, and a table of all."""
    speedups = {sharding: [sharding.speedup(*point) for point in POINTS] for sharding in SHARDINGS}
    published = [generation for generation, _ in POINTS.values()]
    largest_error = {
        sharding: max(abs(a / b - 1) for a, b in zip(values, published, strict=True))
        for sharding, values in speedups.items()
    }
    best = min(largest_error, key=lambda sharding: largest_error[sharding])
    cells = [
        Figure(
            f"best sharding: {_title(point)}: generation",
            rollout,
            value,
            "assumed",
            0.10,
            why="the sharding, chosen because it agrees",
        )
        for (point, (rollout, _)), value in zip(POINTS.items(), speedups[best], strict=True)
    ]
    for logprob in LOGPROB:
        share = best.share(512, logprob)
        for (point, (_, step)), value in zip(POINTS.items(), speedups[best], strict=True):
            if point[0] == 512:
                name = f"best sharding: {_title(point)}: step"
                why = f"the sharding; log-probs {logprob:g} of training"
                cells.append(Figure(name, step, step_speedup(share, value), "assumed", why=why))
    header = ["sharding", *(_title(point) for point in POINTS), "generation in a step", "steps on 512"]
    rows = [
        [sharding.name, *_compared(values, published), *_steps(sharding, values)]
        for sharding, values in speedups.items()
    ]
    counts = [
        [sharding.name, *(f"{sharding.speedup(count, 5, 4.0):.2f}" for count in COUNTS)] for sharding in SHARDINGS
    ]
    notes = [
        f"Nothing is fitted. Assumed: 8-bit weights and caches and {ROWS:,} rows (published), lengths of mean "
        f"{MEAN:,.0f} and at most {LIMIT:,} tokens (NeMo RL's recipe for the model), training at {TRAINED:,.0f} "
        f"tokens/s a GPU (Megatron-Bridge 25.09), log-probs in {LOGPROB[0]:g} to {LOGPROB[1]:g} of that time.",
        f"The sharding is not published. The best of {len(SHARDINGS)}, chosen after the fact, is: {best.name}. It is "
        "promised to be within 10% of generation. The first table has generation of all shardings with "
        "their errors, the share of generation in a step on 512 GPUs, and the speed-ups of a step (the other stages "
        f"are assumed, log-probs at {LOGPROB[0]:g}).",
    ]
    tables = [
        (header, rows),
        (["k = 5, acceptance length 4, by GPUs", *(f"{count:,}" for count in COUNTS)], counts),
    ]
    return PageSection("235B: only sheets", "arXiv 2604.26779, projections", notes, cells, tables)


def _title(point: tuple[int, int, float]) -> str:
    gpus, k, acceptance = point
    return f"{gpus:,} GPUs, k = {k}, length {acceptance:g}"


def _compared(values: Sequence[float], published: Sequence[float]) -> list[str]:
    return [f"{value:.2f} ({value / number - 1:+.0%})" for value, number in zip(values, published, strict=True)]


def _steps(sharding: Sharding, values: Sequence[float]) -> list[str]:
    """Return the share of generation in a step on 512 GPUs, and the speed-ups of steps there."""
    share = sharding.share(512, LOGPROB[0])
    steps = [step_speedup(share, value) for (gpus, *_), value in zip(POINTS, values, strict=True) if gpus == 512]
    return [f"{share:.2f}", " / ".join(_compared(steps, [step for _, step in POINTS.values()][:3]))]
