"""Compare the automatic draft length with plain decoding and with the best fixed one: drafts x slots x temperatures.

Run from the repository's root: python -m benchmarks.never_slower

- Every cell starts like a new run: round costs are measured, and nothing is known about the draft. All steps count.
- A step counts with the geometric mean of pairs, in which a fixed length and the automatic choice are timed one after
  the other. On a shared machine, the minimum of as many timings varies more.
- A program compiled twice may differ by a few percent, because its code and buffers lie elsewhere in memory. Steps
  therefore alternate between several compiled instances, each step with its own copy of the parameters.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks import VOCAB, at_temperature, distilled, random_prompts, small
from launch.cli.program import use_compile_cache
from launch.costs.cost_table import CellTimer
from launch.setup.networks import Networks
from launch.timing import format_provenance, geometric_mean, interleaved, interval, show_interval, time_call
from specjax import (
    MeshConfig,
    NGramDrafter,
    NoDrafter,
    Params,
    Prompts,
    Rollout,
    RolloutConfig,
    SamplingLaw,
    make_generate,
    make_mesh,
    seed_step,
)
from specjax.cost import choose, init_drafting, round_seconds, update_drafting
from specjax.rollout.plan import lay_out

MESH, WIDTH = make_mesh(MeshConfig()), 8
CELL_BOUND, POOLED_BOUND, BEST_BOUND = 0.95, 0.98, 0.95
INSTANCES = 3


@dataclass(frozen=True)
class Job:
    """Work of one cell: as many sequences as slots, all of which run to the token budget.

    Attributes:
        networks:      Policy and draft.
        slots:         Sequences, all decoded together.
        budget:        Tokens of each sequence.
        draft_lengths: Lengths to choose from.
    """

    networks: Networks
    slots: int
    budget: int
    draft_lengths: tuple[int, ...]

    @cached_property
    def config(self) -> RolloutConfig:
        return RolloutConfig(group_size=1, max_new_tokens=self.budget, draft_lengths=self.draft_lengths)

    @cached_property
    def programs(self) -> list[dict[str, Callable[..., Rollout]]]:
        """Return INSTANCES compiled copies of "auto" and of "plain", which decodes without a draft."""
        plain = replace(self.config, draft_lengths=(), draft_length=0)
        policy, drafter = self.networks.policy, self.networks.drafter
        return [
            {
                "auto": make_generate(policy, drafter, self.config, MESH),
                "plain": make_generate(policy, NoDrafter(), plain, MESH),
            }
            for _ in range(INSTANCES)
        ]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Return the seconds of a round, float32 [1, lengths], measured as at the start of a run."""
        phases = lay_out(self.config, self.slots, WIDTH)
        cells = CellTimer(self.networks, self.config, phases, self.prompts(0), MESH).measure(self.networks.params, 0)
        return round_seconds(cells, phases, self.draft_lengths)

    @cached_property
    def predicted(self) -> Callable[[Params, Prompts, Rollout], jax.Array]:
        """Return a function that predicts acceptance at position 1, as an update on the rollout reports it."""
        policy, drafter = self.networks.policy, self.networks.drafter

        @jax.jit
        def overlap(params: Params, prompts: Prompts, rollout: Rollout) -> jax.Array:
            tokens = jnp.concatenate([prompts.tokens, rollout.tokens], axis=1)
            answered = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] >= WIDTH, tokens.shape)
            output = policy.apply(params.policy, tokens, jnp.zeros(self.slots, jnp.int32))
            loss = drafter.loss(params, tokens, output, answered, SamplingLaw())
            return jnp.sum(loss.overlap) / jnp.sum(rollout.lengths, dtype=jnp.float32)

        return overlap

    def prompts(self, step: int) -> Prompts:
        return random_prompts(np.random.default_rng(step), self.slots, WIDTH)


@dataclass(frozen=True)
class DraftCell:
    """Measurements of one cell of the grid.

    Attributes:
        over:   Speed-up of the automatic choice over each fixed draft length, per step.
        chosen: Draft length of the automatic choice, per step.
        alpha:  Acceptance length of the automatic choice, per step.
    """

    over: dict[int, list[float]]
    chosen: list[int]
    alpha: list[float]

    @property
    def best(self) -> int:
        """Return the fastest fixed draft length."""
        return min(self.over, key=lambda k: geometric_mean(np.array(self.over[k]), axis=0))


def measure(job: Job, params: Params, steps: int, repeats: int) -> DraftCell:
    """Time the automatic choice against each fixed length, on the prompts and noise of each step.

    Plain decoding gets `repeats` pairs per step, other lengths a quarter as many.
    """
    lengths, chosen, alpha = job.draft_lengths, [], []
    drafting = init_drafting(lengths, job.seconds)
    over: dict[int, list[float]] = {k: [] for k in lengths}
    # All are held at once, so that each has its own place in memory.
    copies = jax.block_until_ready([jax.tree.map(jnp.copy, params) for _ in range(steps)])
    for step, params in enumerate(copies):
        prompts, noise, programs = job.prompts(step), seed_step(0, step), job.programs[step % INSTANCES]
        drafted = {k: partial(programs["auto"], params, prompts, noise, jnp.array([i])) for i, k in enumerate(lengths)}
        fixed = drafted | {0: partial(programs["plain"], replace(params, draft={}), prompts, noise)}
        k = lengths[int(choose(drafting, lengths)[0])]
        if step < INSTANCES:
            # The order of compilation alternates.
            runs = [*fixed.values(), *drafted.values()][:: 1 if step % 2 else -1]
            jax.block_until_ready([run() for run in runs])
        for length, run in fixed.items():
            pair = {"fixed": partial(time_call, run), "auto": partial(time_call, drafted[k])}
            times = interleaved(pair, repeats if length == 0 else -(-repeats // 4))
            over[length].append(float(geometric_mean(np.divide(times["fixed"], times["auto"]), axis=0)))
        rollout = drafted[k]()
        assert rollout.row_rounds is not None
        chosen.append(k)
        alpha.append(float((rollout.lengths - 1).sum() / rollout.row_rounds.sum()))
        # As in training. A lookup has no prediction: the rollout carries counts of its acceptance.
        expected = job.predicted(params, prompts, rollout) if jax.tree.leaves(params.draft) else None
        drafting = update_drafting(drafting, rollout, expected, lengths)
    return DraftCell(over, chosen, alpha)


def written(ratios: list[float]) -> str:
    """Return the geometric mean of the steps with its 95% interval, as text."""
    return show_interval(interval(ratios, center=geometric_mean), "5.3f")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="rollouts per cell")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of timings per rollout")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[2, 8, 32], help="sequences, all decoded together; to compare"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="to compare")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 1, 3], help="0 and others, ascending")
    parser.add_argument("--budget", type=int, default=48, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=16, help="layers of the policy")
    parser.add_argument("--hidden-size", type=int, default=64, help="width of both networks")
    parser.add_argument("--distil", type=int, default=150, help="steps that distil the trained head")
    options = parser.parse_args()
    use_compile_cache()
    print(format_provenance("benchmarks.never_slower"))
    random = small(options.layers, MESH, options.hidden_size)
    trained = distilled(random, MESH, options.distil)
    lookup = replace(random, drafter=NGramDrafter(VOCAB, 1, 1), params=replace(random.params, draft={}))
    print("ratios are of speeds, geometric means over the steps of a cell with their 95% intervals;")
    print("of all cells, those of the means of cells")
    print("draft    slots  temp  auto / plain          auto / best fixed         chosen        alpha  cost of a round")
    cells: list[DraftCell] = []
    for slots in options.slots:
        shape = slots, options.budget, tuple(options.draft_lengths)
        eagle, ngram = Job(random, *shape), Job(lookup, *shape)
        for name, job, networks in (("trained", eagle, trained), ("random", eagle, random), ("n-gram", ngram, lookup)):
            cost = " ".join(f"{x:.2f}" for x in job.seconds[0] / job.seconds[0, 0])
            scaled = ("policy", "draft") if networks.params.draft else ("policy",)
            for temperature in options.temperatures:
                params = at_temperature(networks.params, temperature, *scaled)
                cell = measure(job, params, options.steps, options.repeats)
                cells.append(cell)
                print(
                    f"{name:8} {slots:5} {temperature:5}  {written(cell.over[0])}  {written(cell.over[cell.best])} "
                    f"({cell.best})  {''.join(map(str, cell.chosen)):12}  {np.mean(cell.alpha[1:]):5.2f}  {cost}",
                    flush=True,
                )
    plain = [cell.over[0] for cell in cells]
    least = min(interval(ratios, center=geometric_mean)[1] for ratios in plain)
    # Each cell counts once, because its steps resemble each other more than the steps of other cells.
    pooled = [float(geometric_mean(np.array(ratios), axis=0)) for ratios in plain]
    best = [float(geometric_mean(np.array(cell.over[cell.best]), axis=0)) for cell in cells]
    verdict = {True: "holds", False: "FAILS"}
    print(f"auto / plain, least lower bound of a cell  {least:.3f}: >= {CELL_BOUND} {verdict[least >= CELL_BOUND]}")
    for name, ratios, bound in (("plain", pooled, POOLED_BOUND), ("best fixed", best, BEST_BOUND)):
        holds = interval(ratios, center=geometric_mean)[1] >= bound
        print(f"auto / {name}, all cells  {written(ratios)}: lower bound >= {bound} {verdict[holds]}")


if __name__ == "__main__":
    main()
