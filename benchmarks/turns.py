"""Measure rollouts of several turns: tools that take time, drafts over turns, and what an answer's forward saves.

Run from the repository's root: python -m benchmarks.turns [--repeats N]

- Tools: 16 rows call a tool of 50 ms at every turn, in threads and in processes. The same rollout with a tool that
  answers at once takes turns with it; both have the same tokens. The sum over rows would be 800 ms a turn.
- Steps: whole training steps with a lookup, and with an EAGLE-3 head, over steps without drafts. Verification is
  `coupled`, so that all arms sample the same tokens. Prompts are text of the policy's own, and the environment answers
  with pieces of the prompt, as tools whose output a model goes on to quote: what is accepted follows from this
  made-up task. The head is distilled before, and not trained.
- Answers: the program that appends an answer of 32 tokens with the caches kept, against a prefill of the whole row.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks import VOCAB, at_temperature, distilled, random_prompts, small
from benchmarks.slow_tool import SlowTool
from launch.cli.program import use_compile_cache
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer
from launch.environments.joint import Joint
from launch.environments.processes import ProcessEpisodes
from launch.environments.threads import ThreadEpisodes
from launch.environments.token_environment import Reports, TokenEnvironment, turn_reader
from launch.setup.networks import Networks
from launch.timing import format_provenance, geometric_mean, interleaved, interval, show_interval, time_call
from specjax import (
    DraftTrainingConfig,
    MeshConfig,
    NGramDrafter,
    NoDrafter,
    Params,
    Prompts,
    RolloutConfig,
    SamplingLaw,
    TrainConfig,
    init_train_state,
    make_generate,
    make_mesh,
    make_train_step,
    seed_step,
)
from specjax.drafters import Drafter
from specjax.environments import Answer, at_once
from specjax.rewards import environment_reward
from specjax.rollout.admission import prefill
from specjax.rollout.append import append
from specjax.rollout.host_turns import HostTurns
from specjax.rollout.rounds import Decoding, RoundState
from specjax.rollout.speculative import start_rollout
from specjax.train.optimizer import OptimizerConfig

MESH, LIMIT_S = make_mesh(MeshConfig()), 60.0
TOOL_S, ROWS, TURNS, BOUND_MS = 0.05, 16, 4, 100.0
# Tokens that end a turn: after a dozen tokens, in the policy's own text.
STOPS, QUOTED = tuple(range(0, VOCAB, 12)), 16
ANSWERED, ANSWER = 4, 32


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    layers, width: of the policy of steps and answers. repeats: turns of every measurement. budget: tokens of a
    completion in a step. contexts: tokens before an answer. distil: steps that distil the head.
    """

    layers: int = 6
    width: int = 384
    repeats: int = 8
    budget: int = 256
    contexts: tuple[int, ...] = (256, 512, 1024)
    distil: int = 300


QUICK = Sizes(layers=1, width=64, repeats=1, budget=48, contexts=(16,), distil=2)


def tools(sizes: Sizes) -> dict[str, dict[float, list[dict[str, float]]]]:
    """Return the times of rollouts, by where the tool runs and by its seconds."""
    networks, tokenizer = small(2, MESH), ByteTokenizer()
    config = RolloutConfig(
        group_size=1,
        max_new_tokens=512,
        draft_length=0,
        stop_tokens=STOPS,
        law=SamplingLaw(temperature=4.0),  # no row runs in a loop that has no stop token
        environment=_environment(tokenizer, None, 0.0),
        turns=TURNS,
    )
    run, prompts = make_generate(networks.policy, NoDrafter(), config, MESH), random_prompts(_rng(0), ROWS, 8)
    assert isinstance(run, HostTurns)
    params, measured = replace(networks.params, draft={}), dict[str, dict[float, list[dict[str, float]]]]()

    def rollout(environment: TokenEnvironment, step: int) -> dict[str, float]:
        run.environment = environment
        seconds = time_call(lambda: run(params, prompts, seed_step(0, step)))
        return run.seconds | {"seconds": seconds}

    with ExitStack() as stack:
        spec = {"environment": "benchmarks.slow_tool:SlowTool"}
        places: dict[str, Any] = {"threads": ThreadEpisodes(SlowTool, LIMIT_S, LIMIT_S)}
        places["processes"] = ProcessEpisodes(spec, LIMIT_S, LIMIT_S)
        for place, episodes in places.items():
            stack.enter_context(episodes)
            arms = {took: _environment(tokenizer, episodes, took) for took in (0.0, TOOL_S)}
            for environment in arms.values():
                rollout(environment, 0)
            turns = [
                interleaved({took: partial(rollout, each, step) for took, each in arms.items()}, 1)
                for step in range(sizes.repeats)
            ]
            measured[place] = {took: [turn[took][0] for turn in turns] for took in arms}
    return measured


def _environment(tokenizer: ByteTokenizer, episodes: Any, took: float) -> TokenEnvironment:
    problems = [Problem(prompt="", answer=str(took))] * ROWS
    read, joint = turn_reader(tokenizer, STOPS, ()), Joint(tokenizer, limit=8, roles=("user",))
    return TokenEnvironment(8, problems, episodes, read, joint, Reports("benchmark"))


def print_tools(measured: dict[str, dict[float, list[dict[str, float]]]]) -> None:
    """Print what the tool's time costs a turn, and where rollouts spend their time."""
    print(f"\n{ROWS} rows of {TURNS} turns; a tool of {1000 * TOOL_S:.0f} ms, over one that answers at once")
    print("tool in        ms more a turn      seconds of a rollout: decoding  waiting  tools   all   (at once)")
    for place, arms in measured.items():
        fast, slow = arms[0.0], arms[TOOL_S]
        more = [1000 * (b["seconds"] - a["seconds"]) / TURNS for a, b in zip(fast, slow, strict=True)]
        found = interval(more)
        means = [np.mean([each[name] for each in slow]) for name in ("time/decoding", "time/waiting", "time/tools")]
        whole = [np.mean([each["seconds"] for each in arm]) for arm in (slow, fast)]
        print(
            f"{place:<12}{show_interval(found, '.0f'):>17}{means[0]:33.3f}{means[1]:9.3f}{means[2]:7.3f}"
            f"{whole[0]:6.3f}{whole[1]:12.3f}"
        )
        holds = "holds" if found[2] < BOUND_MS else "FAILS"
        print(f"  upper bound {found[2]:.0f} < {BOUND_MS:.0f} ms: {holds}; rows one after the other: {ROWS * 50}")


@dataclass(frozen=True, eq=False)
class Quotes:
    """A `HostEnvironment` that answers with a piece of the prompt, at once. prompts: int32 [N, P], by id."""

    prompts: np.ndarray
    width: int = QUOTED

    def begin(self, problem: int, seed: int) -> "Quotes.Episode":
        return Quotes.Episode(self.prompts[problem].tolist())

    @dataclass(frozen=True)
    class Episode:
        """Conversation about one prompt."""

        prompt: list[int]

        def step(self, turn: Sequence[int]) -> Future[Answer]:
            start = sum(turn) % (len(self.prompt) - QUOTED)
            return at_once(Answer(self.prompt[start : start + QUOTED], reward=float(turn[0] % 2)))

        def end(self) -> Future[float]:
            return at_once(0.0)


@dataclass(frozen=True)
class Step:
    """Seconds of a training step and of its rollout, and the rollout's tokens and acceptance length."""

    seconds: float
    rollout: float
    sampled: float
    observed: float
    acceptance: float


def steps(networks: Networks, sizes: Sizes, temperature: float) -> dict[str, list[Step]]:
    """Return the steps of each arm."""
    networks = replace(networks, params=at_temperature(networks.params, temperature, "policy", "draft"))
    prompts = _own_text(networks, count=2, width=64)
    arms: dict[str, tuple[Drafter, int]] = {
        "no drafts": (NoDrafter(), 0),
        "lookup": (NGramDrafter(VOCAB, 1, 4), 3),
        "EAGLE-3": (networks.drafter, 3),
    }
    takes = {name: _arm(networks, drafter, k, prompts, sizes) for name, (drafter, k) in arms.items()}
    return interleaved(takes, sizes.repeats)


def _own_text(networks: Networks, count: int, width: int) -> Prompts:
    """Return prompts that the policy wrote, but for their first tokens."""
    started = random_prompts(_rng(1), count, 4)
    plain = RolloutConfig(group_size=1, max_new_tokens=width - 4, draft_length=0)
    params = replace(networks.params, draft={})
    written = make_generate(networks.policy, NoDrafter(), plain, MESH)(params, started, seed_step(1, 0))
    tokens = jnp.concatenate([started.tokens, written.tokens], axis=1)
    return Prompts(tokens, jnp.full(count, width, jnp.int32), started.id)


def _arm(networks: Networks, drafter: Drafter, k: int, prompts: Prompts, sizes: Sizes) -> Callable[[], Step]:
    """Return a function that takes the next step of an arm. The first one, which compiles, is taken here."""
    rollout = RolloutConfig(
        group_size=2,
        max_new_tokens=sizes.budget,
        draft_length=k,
        verifier="coupled",
        stop_tokens=STOPS,
        environment=Quotes(np.asarray(prompts.tokens)),
        turns=12,
    )
    # Completions must not change from step to step but by their noise.
    frozen, still = DraftTrainingConfig(mode="frozen"), OptimizerConfig(learning_rate=1e-9)
    config = TrainConfig(rollout=rollout, policy_optimizer=still, draft_training=frozen)
    step = make_train_step(networks.policy, drafter, environment_reward, config, MESH)
    count, width = prompts.tokens.shape
    own = networks.params if drafter is networks.drafter else replace(networks.params, draft={})
    state = init_train_state(jax.tree.map(jnp.copy, own), config, MESH, prompts=(count, width))

    def take() -> Step:
        nonlocal state
        metrics: Mapping[str, Any] = {}

        def run() -> Any:
            nonlocal state, metrics
            state, _, metrics = step(state, prompts)
            return state, metrics

        seconds = time_call(run)
        rollout = sum(float(metrics[f"time/{part}"]) for part in ("decoding", "waiting", "tools"))
        counts = ("rollout/tokens", "rollout/observed_tokens", "rollout/acceptance_length")
        return Step(seconds, rollout, *(float(metrics[name]) for name in counts))

    take()
    return take


def print_steps(measured: dict[str, list[Step]], temperature: float) -> None:
    """Print each arm's means, and its speed over steps without drafts, turn by turn."""
    print(f"\nwhole steps, temperature {temperature}")
    print(
        "arm         s/step  s/rollout  sampled  observed  acceptance   steps over no drafts   rollouts over no drafts"
    )
    plain = measured["no drafts"]
    for name, arm in measured.items():
        ratios = [
            show_interval(
                interval(
                    [getattr(a, of) / getattr(b, of) for a, b in zip(plain, arm, strict=True)], center=geometric_mean
                ),
                ".2f",
                "x",
            )
            for of in ("seconds", "rollout")
        ]
        mean = {field: np.mean([getattr(each, field) for each in arm]) for field in Step.__annotations__}
        print(
            f"{name:<10}{mean['seconds']:8.2f}{mean['rollout']:11.2f}{mean['sampled']:9.0f}{mean['observed']:10.0f}"
            f"{mean['acceptance']:12.2f}{ratios[0]:>23}{ratios[1]:>26}"
        )


def answers(networks: Networks, sizes: Sizes, context: int) -> dict[str, list[float]]:
    """Return the seconds of a prefill of whole rows, and of an append of an answer after `context` tokens."""
    answer = Quotes(np.zeros((1, 2 * QUOTED), np.int32))
    config = RolloutConfig(group_size=1, max_new_tokens=2 * ANSWER, draft_length=0, environment=answer)
    params, run = replace(networks.params, draft={}), seed_step(0, 0)
    before, whole = (random_prompts(_rng(2), ANSWERED, width) for width in (context, context + ANSWER))

    def decoding(params: Params) -> Decoding:
        return Decoding(networks.policy, NoDrafter(), params, config)

    @partial(jax.jit, donate_argnums=1)
    def append_answer(params: Params, state: RoundState) -> RoundState:
        tokens, count = state.tokens[:, :ANSWER], jnp.full(ANSWERED, ANSWER)
        after = append(decoding(params), state, tokens, count)
        return replace(after, emitted=state.emitted, pending=state.pending)  # so that it can be repeated

    @jax.jit
    def prefill_rows(params: Params) -> Any:
        return prefill(decoding(params), whole, jnp.array(False)).cache

    state = jax.jit(lambda params: start_rollout(decoding(params), before, run, ANSWERED).state)(params)

    def take() -> RoundState:
        nonlocal state
        state = append_answer(params, state)
        return state

    runs = {"prefill": partial(time_call, lambda: prefill_rows(params)), "append": partial(time_call, take)}
    interleaved(runs, 1)  # compiles
    return interleaved(runs, 3 * sizes.repeats)


def print_answers(measured: Mapping[int, dict[str, list[float]]]) -> None:
    """Print the seconds of both ways to take an answer."""
    print(f"\nan answer of {ANSWER} tokens, {ANSWERED} rows: seconds")
    print("tokens before   append   prefill of the row   prefill over append")
    for context, times in measured.items():
        ratios = np.divide(times["prefill"], times["append"]).tolist()
        means = np.median(times["append"]), np.median(times["prefill"])
        found = show_interval(interval(ratios, center=geometric_mean), ".1f")
        print(f"{context:13d}{means[0]:9.4f}{means[1]:21.4f}{found:>22}")


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=Sizes.repeats, help="turns of every measurement")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.5], help="of the policy in steps")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    options = parser.parse_args(argv)
    sizes = QUICK if options.quick else Sizes(repeats=options.repeats)
    use_compile_cache()
    print(format_provenance("benchmarks.turns"))
    print_tools(tools(sizes))
    networks = small(sizes.layers, MESH, sizes.width)
    print_answers({context: answers(networks, sizes, context) for context in sizes.contexts})
    networks = distilled(networks, MESH, sizes.distil)
    for temperature in options.temperatures:
        print_steps(steps(networks, sizes, temperature), temperature)


if __name__ == "__main__":
    main()
