"""A step with and without speculation, stage by stage: `python -m launch.compare CONFIG [--draft-lengths 0,3,5,7]`.

The table of arXiv 2604.26779 for a run of one's own: each arm takes the same steps, on the same prompts with the same
seeds, from the same state.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from launch.build.experiment import Experiment, build_experiment
from launch.cli.errors import ConfigError
from launch.cli.options import Numbers, parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_writable, make_directory
from launch.cli.pyplot import load_pyplot
from launch.comparison.reward_curves import as_json as curves_as_json
from launch.comparison.reward_curves import print_curves, save_plot, train_both
from launch.comparison.stage_times import as_json as arms_as_json
from launch.comparison.stage_times import compare, print_comparison, print_partings
from launch.comparison.variants import AUTOMATIC, PLAIN, Arm, make_arms
from launch.costs.cost_table import RoundClock, load_cells
from launch.data.batches import check_supervised
from launch.distillation.trainer import check_distillation, distill
from launch.rewards.reward_fn import make_pool, make_reward
from launch.run.console import reasons
from launch.run.directory import restore_params, saved_step
from launch.run.start import warmed_up, warmup_length
from launch.timing import in_turns, origin, provenance
from models.files import write_atomically
from specjax.checkpoint import Which
from specjax.cost import Cell, Drafting, round_seconds
from specjax.types import Params

# Of the table, which a narrower terminal wraps.
WIDTH = 170
console = Console(highlight=False, soft_wrap=True, markup=False, width=WIDTH)

STEPS = 20


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Options of launch.compare alone; --steps is how many steps each arm is timed for.

    Attributes:
        draft_lengths:   to compare, and to choose among; 0, autoregressive, always is one of them.
        checkpoint:      the directory of a run, which has the policy and the draft; None begins as the recipe does, and
                         distils a draft that has random weights.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        json:            a file for everything that was measured.
        train_steps:     train the autoregressive arm and the automatic one for so many steps as well, and draw what
                         they are rewarded; 0 does not.
        plots:           a directory for these curves; needs matplotlib.
    """

    draft_lengths: Numbers = Numbers((0, 3, 5, 7))
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    json: str | None = None
    train_steps: int = 0
    plots: str | None = None

    def __post_init__(self) -> None:
        if min(self.draft_lengths, default=0) < 0 or not any(self.draft_lengths):
            raise ValueError(
                f"draft_lengths = {tuple(self.draft_lengths)}: each must be at least 0, and one more than that"
            )
        check_writable("json", self.json)
        if self.train_steps < 0:
            raise ValueError(f"train_steps = {self.train_steps}: must be at least 0")
        if self.plots is not None and not self.train_steps:
            raise ValueError(f"plots = {self.plots}: must be none without train_steps, of which the curves are")


def main(argv: list[str]) -> int:
    """Begin as the run does, or as it ended; then time the arms in turns."""
    use_compile_cache()
    config, own = parse_run_and(
        CompareArgs, argv, "python -m launch.compare", "The stages of a step with and without speculation.", steps=STEPS
    )
    if not config.draft.proposes:
        raise ConfigError("draft.kind = none: there is nothing to compare with autoregressive decoding")
    if own.plots is not None:
        load_pyplot()
        make_directory("plots", own.plots)
    lengths = tuple(sorted({0, *own.draft_lengths}))
    experiment = build_experiment(replace(config, rollout=replace(config.rollout, draft_lengths=lengths)))
    cells = None if config.cost_table is None else load_cells(Path(config.cost_table), experiment.phases, lengths)
    _check(experiment, own)
    found = origin("launch.compare") | {"recipe": config.name}
    found |= {"checkpoint": own.checkpoint, "checkpoint_step": own.checkpoint_step}
    pool = make_pool(config.reward)
    with pool or nullcontext():
        console.print(provenance("launch.compare"))
        params = _begin(experiment, own)
        table = round_seconds(cells or _cells(experiment, params), experiment.phases, lengths)
        reward_fn = make_reward(pool, experiment.problems.train, experiment.tokenizer, experiment.mesh)
        arms, drafting = make_arms(experiment, reward_fn, params, table)
        found |= {"verifier": config.rollout.verifier, "arms": _measure(experiment, arms, drafting)}
        if own.train_steps:
            found["training"] = _train(experiment, arms, own)
    if own.json is not None:
        write_atomically(Path(own.json), json.dumps(found, indent=2) + "\n")
    return 0


def _measure(experiment: Experiment, arms: Mapping[str, Arm], drafting: Drafting) -> dict[str, Any]:
    """Time the arms in turns, and print what that comes to."""
    lengths = experiment.train.rollout.lengths
    turns = in_turns({name: arm.turn for name, arm in arms.items()}, experiment.config.steps)
    chosen = {name: tuple(lengths[index] for index in arm.chosen or ()) for name, arm in arms.items()}
    reports = compare(turns, chosen)
    print_comparison(reports, console)
    console.print(f"automatic:\n{reasons(experiment.phases, lengths, drafting)}")
    print_partings(reports, console)
    return arms_as_json(reports, turns)


def _train(experiment: Experiment, arms: Mapping[str, Arm], own: CompareArgs) -> dict[str, Any]:
    """Train both, print and draw what they are rewarded."""
    plain, other, apart = train_both(arms[PLAIN], arms[AUTOMATIC], own.train_steps)
    curves = {PLAIN: plain, AUTOMATIC: other}
    print_curves(
        curves,
        apart,
        str(experiment.config.rollout.verifier),
        jnp.dtype(experiment.networks.policy.dtype).name,
        console,
    )
    if own.plots is not None:
        save_plot(Path(own.plots), curves)
    return curves_as_json(curves, apart)


def _check(experiment: Experiment, own: CompareArgs) -> None:
    """Raise ConfigError where the run could not begin."""
    config = experiment.config
    if own.checkpoint is not None:
        saved_step(Path(own.checkpoint), own.checkpoint_step)
        return
    if config.warmup.steps:
        check_supervised(
            experiment.problems.train, experiment.tokenizer, config.warmup.batch_size, warmup_length(experiment)
        )
    if _distils(experiment):
        check_distillation(experiment)


def _distils(experiment: Experiment) -> bool:
    """Whether a draft is distilled first: as the recipe has it, and always one that would tell of nothing."""
    networks = experiment.networks
    random = networks.draft_from is None and bool(jax.tree.leaves(networks.params.draft))
    return experiment.config.distill.steps > 0 or random


def _begin(experiment: Experiment, own: CompareArgs) -> Params:
    """The networks to compare with."""
    if own.checkpoint is not None:
        return restore_params(Path(own.checkpoint), experiment, own.checkpoint_step)
    params = warmed_up(experiment, console)
    if not _distils(experiment):
        return params
    if not experiment.config.distill.steps:
        console.print(
            "the draft has random weights: distilled first, as launch.distill would (--checkpoint takes a run's)"
        )
    return replace(params, draft=distill(experiment, params, console.print).draft)


def _cells(experiment: Experiment, params: Params) -> list[Cell]:
    prompts = experiment.train_prompts.batch(np.arange(experiment.config.data.prompts))
    clock = RoundClock(
        experiment.networks, experiment.train.rollout, experiment.phases, prompts, experiment.mesh, beyond=False
    )
    return clock.measure(params, 0)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
