"""Sections of the paper's 8B runs: acceptance, generation, mechanisms, steps and asynchrony."""

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.simulation.acceptance import DECAY, predict_length
from benchmarks.simulation.point import Point
from benchmarks.simulation.step import step_seconds
from benchmarks.simulator_validation.cells import Figure, Kind, PageSection
from benchmarks.simulator_validation.mechanisms import LINEAR, MEDIAN, WORST, FittedMechanism, fitted_mechanisms
from benchmarks.simulator_validation.paper_8b_rollouts import (
    AUTOREGRESSIVE,
    BASE,
    FITTED,
    GENERATION,
    ROOFLINE,
    RolloutFit,
)
from specjax.cost import find_engine

SOURCE = "arXiv 2604.26779, Qwen3-8B on 32 GB200, NeMo RL 0.6 with vLLM 0.17"
# Of the runs with drafts, seconds: data, preparation, log-probs, training. Of those without: a step.
STAGES = {"Zero": ((0.2, 2.1, 18.1, 30.5), 151.2), "Think": ((0.2, 1.6, 18.1, 30.5), 185.3)}
# Of the runs with drafts: seconds of generation and of a step.
MEASURED = {"Zero": (56.6, 107.5), "Think": (87.0, 137.4)}
# The asynchronous run: seconds of a step without drafts, of its generation that nothing hides, of a step with drafts.
ASYNCHRONOUS = (75.0, 10.4, 60.5)

# Inputs of the cells, and why they are no predictions.
ASSUMED = "rows, lengths and mechanism"
GIVEN = "the other stages, as published"


def acceptance() -> PageSection:
    """Return acceptance lengths at k = 5 and 7, from k = 3."""
    cells = []
    for run in ("Zero", "Think"):
        measured = GENERATION[run, 3, "DAPO"][0]
        cells.append(Figure(f"{run}, k = 3", measured, predict_length(measured, 3, 3), "fitted"))
        for k in (5, 7):
            published = GENERATION[run, k, "DAPO"][0]
            cells.append(Figure(f"{run}, k = {k}", published, predict_length(measured, 3, k), "predicted", 0.04))
    notes = [
        f"Each position is accepted {DECAY} times as often as the one before, given that all before were. The factor "
        "is that of SkyRL#1832, another model and draft."
    ]
    return PageSection("Acceptance length", SOURCE, notes, cells)


def generation() -> PageSection:
    """Return the speed-ups of generation: a roofline, an affine law, and the mechanism that is fitted to two cells."""
    best, roofline, rivals = (
        _chosen_fit(),
        RolloutFit(ROOFLINE, BASE),
        [trial for trial in fitted_mechanisms() if trial.exact],
    )
    passing = [trial for trial in fitted_mechanisms() if trial.passes]
    cells = [
        Figure(f"{run}, without drafts, s", seconds, best.fit.seconds(run, 0, 1.0), "fitted")
        for run, seconds in AUTOREGRESSIVE.items()
    ]
    for cell, (_, published) in GENERATION.items():
        run, k, _ = cell
        values = [trial.fit.speedups[cell] for trial in rivals]
        kind: Kind = "fitted" if cell in FITTED else "assumed"
        why = "" if cell in FITTED else ASSUMED
        name, value = _name(cell), best.fit.speedups[cell]
        if run == "Think" and k > 3:
            # Two mechanisms explain the runs equally well, so that a band over all of them is all there is.
            why = f"{ASSUMED}; band of the rivals"
            cells.append(Figure(name, published, value, kind, low=min(values), high=max(values), why=why))
        else:
            bound = 0.15 if run == "Think" else 0.05
            cells.append(Figure(name, published, value, kind, None if kind == "fitted" else bound, why=why))
    for run, published in {"Zero": 0.71, "Think": 0.51}.items():
        cells.append(
            Figure(f"{run}, n-gram", published, None, "unpredictable", why="its draft length is not published")
        )
    draft, slower = best.constants
    affine, profile = _affine(), RolloutFit(find_engine("vllm-0.17"), BASE)
    rows = []
    for cell, (_, published) in GENERATION.items():
        values = [trial.fit.speedups[cell] for trial in rivals]
        passing_values = [trial.fit.speedups[cell] for trial in passing]
        without_band = roofline.speedups[cell], affine[cell], profile.speedups[cell]
        compared = (f"{value:.2f} ({value / published - 1:+.0%})" for value in without_band)
        bands = (f"{min(band):.2f} .. {max(band):.2f}" for band in (values, passing_values))
        rows.append([_name(cell), f"{published:.2f}", *compared, *bands])
    notes = [
        "The model: a roofline, a time for each draft pass, and an attention that is slower beyond 16 query rows of a "
        "key-value head, which k = 5 has and k = 3 has not. Two constants are fitted to two cells: "
        f"{draft:.2f} ms and a factor of {1 + slower:.1f} at k = 5. The two median lengths follow from the times "
        f"without drafts. The workload is assumed: {BASE} on each GPU, lognormal lengths.",
        f"Errors of the ten cells that were not fitted: {_errors(best.fit)}. Those of the roofline: "
        f"{_errors(roofline)}.",
    ]
    header = [
        "generation",
        "published",
        "roofline",
        "affine in k",
        "profile vllm-0.17",
        f"all {len(rivals)} rivals",
        f"{len(passing)} that pass",
    ]
    return PageSection("8B: generation", SOURCE, notes, cells, [(header, rows)], [*_unreached(passing)])


def mechanisms() -> PageSection:
    """Return every mechanism in each of its workloads."""
    rows = []
    for trial in fitted_mechanisms():
        errors, speedups = trial.fit.errors, trial.fit.speedups
        chain = (" / ".join(f"{speedups[run, k, 'DAPO']:.2f}" for k in (3, 5, 7)) for run in ("Zero", "Think"))
        constants = ", ".join(f"{value:.3g}" for value in trial.constants) or "none"
        medians = f"{np.median(errors):.0%} / {errors.max():.0%}"
        workload = f"{trial.fit.workload}, spreads {trial.fit.workload.spreads}"
        rows.append([trial.mechanism.name, workload, constants, *chain, medians, "passes" if trial.passes else "fails"])
    published = (" / ".join(f"{GENERATION[run, k, 'DAPO'][1]:.2f}" for k in (3, 5, 7)) for run in ("Zero", "Think"))
    rows.insert(0, ["published", "", "", *published, "", ""])
    notes = [
        f"A mechanism passes if the ten cells that it was not fitted to have a median error of at most {MEDIAN:.0%} "
        f"and none above {WORST:.0%}, if it reproduces the two that it was fitted to. Two kinds pass: attention that "
        "is slower beyond 16 query rows, and verifications that leave the captured graphs beyond 512 tokens. Both are "
        "a threshold between k = 3 and 5, with about a millisecond a draft pass. The published numbers do not "
        "tell them apart; a profile of one round at k = 3 and 5 would.",
        f"Compute that binds is excluded without a fit: if a round costs a + b k, with neither below 0, k = 5 costs at "
        f"most 5/3 of k = 3; in RL-Think it costs {_rise('Think'):.2f} times as much, in RL-Zero {_rise('Zero'):.2f}.",
        "Constants: milliseconds of a draft pass; then the factor less one at k = 5 (k = 3 for the quadratic one), "
        "milliseconds of a round outside the graphs, or of the host.",
    ]
    header = ["mechanism", "workload", "constants", "Zero, k = 3 / 5 / 7", "Think", "median / worst", ""]
    return PageSection("8B: mechanisms", SOURCE, notes, [], [(header, rows)])


def steps() -> PageSection:
    """Return the seconds and speed-ups of whole steps, synchronous and asynchronous."""
    fit, cells = _chosen_fit().fit, []
    for run, (stages, plain) in STAGES.items():
        kind: Kind = "fitted" if run == "Zero" else "assumed"
        generated = AUTOREGRESSIVE[run] / fit.speedups[run, 3, "DAPO"]
        step = step_seconds([generated], sum(stages), 0).seconds
        bound = None if kind == "fitted" else 0.05
        cells.append(
            Figure(f"{run}: generation, s", MEASURED[run][0], generated, kind, bound, why=ASSUMED if bound else "")
        )
        cells.append(Figure(f"{run}: step, s", MEASURED[run][1], step, "assumed", 0.05, why=GIVEN))
        cells.append(
            Figure(f"{run}: step, speed-up", plain / MEASURED[run][1], plain / step, "assumed", 0.05, why=GIVEN)
        )
    logprob, train = STAGES["Zero"][0][2:]
    name, why = "log-prob stage, in training stages", "an input of the simulator, which ranges from 0.25 to 0.6"
    cells.append(Figure(name, logprob / train, Point.logprob_share, "assumed", why=why))
    plain, exposed, published = ASYNCHRONOUS
    other_s = plain - exposed
    cells.append(
        Figure(
            "asynchronous, lag 1, without drafts: step, s", plain, step_seconds([plain], other_s, 1).seconds, "fitted"
        )
    )
    step = step_seconds([plain / fit.speedups["Think", 3, "DAPO"]], other_s, 1).seconds
    cells.append(Figure("asynchronous, lag 1: step, s", published, step, "assumed", 0.10, why=GIVEN))
    cells.append(
        Figure("asynchronous, lag 1: step, speed-up", plain / published, plain / step, "assumed", 0.10, why=GIVEN)
    )
    notes = [
        "The other stages are given, as measured with drafts. A synchronous step is the sum of its stages; with lag 1, "
        "generation has GPUs of its own and the longer of both counts. The law cannot say why the other stages fell "
        f"from {other_s:.1f} s to {published - 0.6:.1f} s when drafts were used."
    ]
    return PageSection("8B: steps", SOURCE, notes, cells)


def sections_with_mechanisms() -> Iterator[PageSection]:
    """Yield the sections of the 8B runs that need the mechanisms: minutes of fits."""
    yield from (generation(), mechanisms(), steps())


def _unreached(passing: Sequence[FittedMechanism]) -> Iterator[str]:
    """Yield a line for each published speed-up outside the range of those that pass."""
    for cell, (_, published) in GENERATION.items():
        values = [trial.fit.speedups[cell] for trial in passing]
        if cell not in FITTED and not min(values) <= published <= max(values):
            yield (
                f"8B: generation: {_name(cell)}: {published} is published; the {len(passing)} fits that pass give "
                f"{min(values):.2f} to {max(values):.2f}, and none reaches it"
            )


def _rise(run: str) -> float:
    """Return the published cost of a round at k = 5 over that at k = 3."""
    costs = [length / speedup for length, speedup in (GENERATION[run, k, "DAPO"] for k in (3, 5))]
    return costs[1] / costs[0]


def _errors(fit: RolloutFit) -> str:
    return f"median {np.median(fit.errors):.0%}, worst {fit.errors.max():.0%}"


def _chosen_fit() -> FittedMechanism:
    return next(trial for trial in fitted_mechanisms() if trial.mechanism is LINEAR and trial.fit.workload == BASE)


def _affine() -> dict[tuple[str, int, str], float]:
    """Return the speed-ups of rounds that cost a + b k, at least 1, with a and b from the fitted cells."""
    (k, cost), (later, later_cost) = ((cell[1], GENERATION[cell][0] / GENERATION[cell][1]) for cell in FITTED)
    slope = (later_cost - cost) / (later - k)
    return {cell: length / max(1.0, cost + slope * (cell[1] - k)) for cell, (length, _) in GENERATION.items()}


def _name(cell: tuple[str, int, str]) -> str:
    run, k, draft = cell
    return f"{run}, k = {k}, {draft}"
