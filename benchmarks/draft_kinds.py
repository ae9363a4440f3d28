"""Compare kinds of drafts in the same RL run: acceptance, generation and whole steps.

Run from the repository's root: python -m benchmarks.draft_kinds CONFIG --arms eagle3 dflash dspark history

An arm is a kind of draft, a lookup, or both: eagle3+history. All arms start from one policy, take the same prompts, and
take turns with every step. The block of a block draft is as long as the draft length, and its width is the one at which
it has as many parameters as the recipe's draft. Every draft is distilled in as many steps from the same answers. In RL
drafts go on learning as the recipe says. With --rollout.verifier coupled all arms generate the same tokens, until
updates that are rounded differently part them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import KINDS, DraftConfig, HeadConfig, RunConfig
from launch.acceptance.held_out import AcceptanceMeter
from launch.cli.options import parse_run_and
from launch.cli.paths import write_results
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import TRAIN
from launch.costs.turns import timed_turns
from launch.distillation.trainer import distill
from launch.phases.long_phases import long_phase
from launch.rewards.reward_fn import make_pool, make_reward
from launch.run.supervised_warmup import warm_up
from launch.setup.drafts.block import BlockDraft
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.state import fresh_state
from launch.timing import format_interval, format_provenance, provenance
from models.drafts.block import init_block
from specjax.drafters import Drafter
from specjax.options import DraftLength, NonNegative, Options, Positive
from specjax.rewards import RewardFn
from specjax.train.timed_step import StagedStep
from specjax.types import Params, PyTree

PLAIN = "none"
LOOKUPS = ("ngram", "history")
BLOCKS = tuple(name for name, kind in KINDS.items() if kind.reads("draft.head.block_size"))


@dataclass(frozen=True, kw_only=True)
class KindsArgs(Options):
    """Options of the program.

    Attributes:
        arms:         Arms, beside `none`: kinds of drafts, lookups, or KIND+LOOKUP.
        draft_length: Tokens that every arm drafts in a round.
        layers:       Layers of block drafts.
        markov_rank:  Rank of dspark's Markov head.
        problems:     Training problems that RL goes through again and again. 0: all of the recipe's.
        part:         Steps that a row of the table holds.
        json:         File for the results.
    """

    arms: tuple[str, ...] = ("eagle3", "dflash", "dspark")
    draft_length: DraftLength = 4
    layers: Positive = 2
    markov_rank: Positive = 16
    problems: NonNegative = 0
    part: Positive = 20
    json: str | None = None


def count(params: PyTree) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def draft_of(arm: str, config: RunConfig, args: KindsArgs) -> DraftConfig:
    """Return the draft section of an arm, before its width is fitted."""
    kind, _, lookup = arm.partition("+")
    if kind in LOOKUPS:
        kind, lookup = PLAIN, kind
    draft = replace(config.draft, lookup=replace(config.draft.lookup, kind=lookup or PLAIN))
    if kind not in BLOCKS:
        return draft.replaced(kind=kind)
    head = HeadConfig(num_layers=args.layers, block_size=args.draft_length)
    if KINDS[kind].reads("draft.head.markov_rank"):
        head = replace(head, markov_rank=args.markov_rank)
    return draft.replaced(kind=kind, head=head)


def with_parameters(draft: DraftConfig, total: int, experiment: Experiment) -> DraftConfig:
    """Return the section of a block draft with the width at which it has about `total` parameters."""
    decoder = experiment.networks.decoder
    assert decoder is not None

    def size(width: int) -> int:
        head = BlockDraft.fresh(replace(draft, intermediate_size=width), decoder, experiment.tokenizer)
        return count(jax.eval_shape(partial(init_block, head), jax.random.key(0)))

    width = 8 * round(1 + (total - size(8)) / (size(16) - size(8)))
    if width < 8:
        sizes = f"layers = {draft.head.num_layers}, markov_rank = {draft.head.markov_rank}"
        raise ValueError(f"{sizes}: must be smaller for a block draft of {total:,} parameters")
    return replace(draft, intermediate_size=width)


@dataclass(frozen=True)
class Start:
    """The state in which an arm starts. accepted: rates on held-out prompts by position, None with a lookup."""

    experiment: Experiment
    drafter: Drafter
    params: Params
    accepted: list[float | None] | None = None


def starts(config: RunConfig, args: KindsArgs) -> dict[str, Start]:
    """Return the arms by name, with their drafts distilled."""

    def experiment_of(draft: DraftConfig) -> Experiment:
        rollout = replace(config.rollout, draft_length=args.draft_length * draft.proposes, draft_lengths=())
        return build_experiment(replace(config, draft=draft, rollout=rollout))

    first = experiment_of(config.draft)
    start, total = warm_up(first), count(first.networks.params.draft)
    drafts, arms, answers = dict[str, PyTree](), dict[str, Start](), None
    for arm in dict.fromkeys((PLAIN, *args.arms)):
        draft = draft_of(arm, config, args)
        if draft.kind in BLOCKS:
            draft = with_parameters(draft, total, experiment_of(draft))
        experiment = experiment_of(draft)
        networks = experiment.networks
        params = replace(networks.params, policy=start.policy, base=start.base)
        alone = draft.lookup.kind == PLAIN
        if networks.draft.has_params and draft.kind not in drafts:
            print(f"distilling {draft.kind}: {count(params.draft):,} parameters", flush=True)
            result = distill(experiment, params, given=answers)
            answers, drafts[draft.kind] = answers or result.answers, result.draft
        params = replace(params, draft=drafts.get(draft.kind, {}))
        accepted = None
        if alone and networks.draft.has_params:
            temperature = config.rollout.law.temperature
            accepted = AcceptanceMeter(experiment, networks.drafter, params, temperature).measure().counts.rates
        train = experiment.problems.train[: args.problems or None]
        experiment = replace(experiment, problems=experiment.problems._replace(train=train))
        arms[arm] = Start(experiment, networks.drafter, params, accepted)
    return arms


def stepper(start: Start, reward_fn: RewardFn) -> Callable[[int], dict[str, float]]:
    """Return a function that takes the arm's next step, whatever its number, and returns what the tables need of it."""
    experiment = start.experiment
    step = StagedStep(replace(experiment.stages(reward_fn), drafter=start.drafter))
    # Copied, because steps donate their state and arms share a policy.
    trained = replace(start.params, base=())
    state = fresh_state(experiment, replace(jax.tree.map(jnp.copy, trained), base=start.params.base), None)
    pipeline = experiment.train_batches()

    def take(number: int) -> dict[str, float]:
        nonlocal state
        (state, _, metrics), seconds = step(state, next(pipeline))
        return {
            "generation": seconds["generation"],
            "step": sum(seconds.values()),
            "alpha": float(metrics.get("rollout/acceptance_length", 1.0)),
            "accuracy": float(metrics["reward/accuracy"]),
        }

    return take


def show(arms: dict[str, Start], turns: list[dict[str, dict[str, float]]], part: int) -> None:
    """Print the drafts, and a table of each part of the steps. Ratios pair the same step of both arms."""
    print("\narm             parameters  accepted at position 1, 2, .. on held-out prompts")
    for name, start in arms.items():
        rates = " ".join(f"{rate:.3f}" for rate in start.accepted or () if rate is not None)
        print(f"{name:<16}{count(start.params.draft):10,}  {rates}")
    print("\nsteps     arm             accuracy  alpha  generation x           step x")
    for begin in range(0, len(turns), part):
        rows = turns[begin : begin + part]
        for name in arms:
            alpha, accuracy = (np.mean([turn[name][field] for turn in rows]) for field in ("alpha", "accuracy"))
            ratios = (
                format_interval([turn[PLAIN][field] / turn[name][field] for turn in rows])
                for field in ("generation", "step")
            )
            steps = f"{begin + 1}..{begin + len(rows)}"
            print(f"{steps:<10}{name:<16}{accuracy:8.2f}  {alpha:5.2f}  " + "  ".join(f"{x:<21}" for x in ratios))


def main(argv: list[str]) -> int:
    """Distil the drafts, run all arms in turns and print the tables."""
    use_compile_cache()
    text = "Compare kinds of drafts in the same RL run."
    config, args = parse_run_and(KindsArgs, argv, "python -m benchmarks.draft_kinds", text, TRAIN)
    print(format_provenance("benchmarks.draft_kinds"), flush=True)
    arms = starts(config, args)
    accepted = {name: start.accepted for name, start in arms.items()}
    results = {**provenance("benchmarks.draft_kinds"), "options": asdict(args), "accepted": accepted}
    problems = arms[PLAIN].experiment.problems.train
    with make_pool(config) or nullcontext() as pool:
        reward_fn = make_reward(pool, problems, arms[PLAIN].experiment.tokenizer)
        steppers = {name: stepper(start, reward_fn) for name, start in arms.items()}
        phase = long_phase("steps of all arms", config.steps, "steps", kept=False)
        turns = timed_turns(phase, steppers, keep=lambda turns: write_results(args.json, results | {"turns": turns}))
    show(arms, turns, args.part)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
