"""Compare whole steps with and without carry-over where lengths have a long tail, by trained tokens per second.

Run from the repository's root: python -m benchmarks.carry_over [--turns N]

A random policy ends a completion at every token with about the same chance, so that the longest of a step is several
times the mean. Every arm trains on eight groups in each step; with carry-over more are under way. All arms shrink their
batch near its end: to a quarter, with carry-over to what may be left over, a third or a half. In a turn each arm takes
STEPS steps; arms take turns.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks import random_prompts, small
from launch.cli.program import use_compile_cache
from launch.timing import format_provenance, geometric_mean, interleaved, interval, show_interval, time_call
from specjax import (
    MeshConfig,
    NoDrafter,
    Prompts,
    Reward,
    Rollout,
    RolloutConfig,
    TrainConfig,
    init_train_state,
    make_mesh,
    make_train_step,
)
from specjax.carry_over.groups import next_prompts
from specjax.train.optimizer import OptimizerConfig

MESH, WIDTH, BUDGET, STOP, TRAINED = make_mesh(MeshConfig()), 8, 512, 0, 8
STEPS, SETTLING = 6, 6
HEADER = "arm           groups in all   s/step  trained tokens    mean  longest  tokens/s    over the first"
# Groups under way, by arm.
ARMS = {"no carry-over": TRAINED, "carry-over": 12, "and more": 16}


@dataclass(frozen=True)
class Turn:
    """Seconds of the steps of an arm in a turn, the tokens that they trained on, and the mean and most of a length."""

    seconds: float
    tokens: int
    mean: float
    longest: int

    @property
    def rate(self) -> float:
        """Return trained tokens per second."""
        return self.tokens / self.seconds


def reward(rollout: Rollout, prompts: Prompts) -> Reward:
    """Return the share of even tokens."""
    written = jnp.arange(BUDGET)[None] < rollout.lengths[:, None]
    value = jnp.mean(written & (rollout.tokens % 2 == 0), axis=1)
    return Reward(value, (value > 0.5).astype(jnp.float32))


def arm(groups: int, samples: int) -> Callable[[], Turn]:
    """Return a function that takes the next STEPS steps of an arm with so many groups of `samples` under way."""
    rows = groups * samples
    phases = ((rows, WIDTH + BUDGET), (rows // 4, WIDTH + BUDGET))
    share = None if groups == TRAINED else TRAINED / groups
    rollout = RolloutConfig(
        group_size=samples, max_new_tokens=BUDGET, draft_length=0, stop_tokens=(STOP,), phases=phases, carry_over=share
    )
    # Lengths must not change from step to step.
    config = TrainConfig(rollout=rollout, policy_optimizer=OptimizerConfig(learning_rate=1e-9))
    networks, ids = small(2, MESH), count()
    step = make_train_step(networks.policy, NoDrafter(), reward, config, MESH)
    state = init_train_state(replace(networks.params, draft={}), config, MESH, prompts=(groups, WIDTH))

    def take(number: int, used: frozenset[int] = frozenset()) -> Prompts:
        fresh = np.array([next(ids) for _ in range(number)], np.int32)
        rng = np.random.default_rng(fresh.sum(dtype=np.int64))
        prompts = jax.tree.map(np.asarray, random_prompts(rng, number, WIDTH))
        return replace(prompts, id=fresh)

    def turn(steps: int) -> Turn:
        nonlocal state
        tokens, lengths = 0, list[np.ndarray]()

        def run() -> None:
            nonlocal state, tokens
            for _ in range(steps):
                prompts = take(groups) if state.carried is None else next_prompts(state.carried, take)
                state, rollout, _ = step(state, prompts)
                assert rollout.batch is not None
                trained = np.asarray(jnp.sum(rollout.batch.trained, axis=1))
                tokens += int(trained.sum())
                lengths.append(trained)

        seconds = time_call(run)
        each = np.concatenate(lengths)
        return Turn(seconds, tokens, float(each.mean()), int(each.max()))

    turn(SETTLING)
    return partial(turn, STEPS)


def main() -> None:
    """Print the table of arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 8], help="sizes of a group")
    args = parser.parse_args()
    use_compile_cache()
    print(format_provenance("benchmarks.carry_over"))
    for samples in args.samples:
        print_table(interleaved({name: arm(groups, samples) for name, groups in ARMS.items()}, args.turns), samples)


def print_table(turns: dict[str, list[Turn]], samples: int) -> None:
    """Print each arm's means, and its trained tokens per second over those of the first, turn by turn."""
    print(f"\n{TRAINED} groups of {samples} trained in a step\n{HEADER}")
    for name, measured in turns.items():
        ratios = [ours.rate / plain.rate for ours, plain in zip(measured, turns[next(iter(ARMS))], strict=True)]
        speedup = show_interval(interval(ratios, center=geometric_mean), ".2f")
        seconds, tokens = (sum(getattr(each, field) for each in measured) for field in ("seconds", "tokens"))
        mean, longest = np.mean([each.mean for each in measured]), max(each.longest for each in measured)
        print(
            f"{name:<14}{ARMS[name]:>14}{seconds / STEPS / len(measured):9.2f}{tokens / STEPS / len(measured):16.0f}"
            f"{mean:8.0f}{longest:9d}{tokens / seconds:10.0f}    {speedup}"
        )


if __name__ == "__main__":
    main()
