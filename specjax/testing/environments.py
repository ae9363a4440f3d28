"""Rollouts with a user's environment, for the assertions: its answers by prefix, and programs that sample with it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters import Drafter
from specjax.environments import Environment, HostEnvironment
from specjax.keys import SeedStep
from specjax.parallel import processes
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.generate import RolloutFn
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.testing.exact import Completion
from specjax.types import Ending, Params, Policy, Prompts, Rollout

# (completion, where its last turn began, number of turns before) -> what is observed; None: the completion ends.
AnswerTo = Callable[[Completion, int, int], Completion | None]
# (history, completion, where its last turn began) -> history, what is observed, whether the completion ends.
Ask = Callable[[Any, Completion, int], tuple[Any, Completion, bool]]


def sampler(
    rollout_fn: RolloutFn, policy: Policy, drafter: Drafter, config: RolloutConfig
) -> Callable[[Params, Prompts, SeedStep], Rollout]:
    """Return the rollout compiled for one device."""
    if config.answers_on_host:
        return make_generate(policy, drafter, config, make_mesh(MeshConfig()), rollout_fn)
    return jax.jit(lambda params, prompts, run: rollout_fn(policy, drafter, params, prompts, run, config))


def answers_to(config: RolloutConfig, prompt: Completion) -> AnswerTo | None:
    """Return what the environment answers to completions of a prompt of id 0; None without an environment.

    Its seed or key is 0 here: it must not depend on it. A turn is asked after those before it.
    """
    environment = config.environment
    if environment is None:
        return None
    ask = _traced(environment, config, prompt) if isinstance(environment, Environment) else _on_host(environment)
    # By completions that end with an observation, or hold nothing: what the environment has made of them.
    histories: dict[Completion, Any] = {(): None}

    def answer(completion: Completion, began: int, turn: int) -> Completion | None:
        history, observed, ends = ask(histories[completion[:began]], completion, began)
        if ends or turn + 1 >= config.turns or len(completion) + len(observed) >= config.max_new_tokens:
            return None
        histories[completion + observed] = history
        return observed

    return answer


def _traced(environment: Environment, config: RolloutConfig, prompt: Completion) -> Ask:
    tokens, zero = jnp.array([prompt], jnp.int32), jnp.zeros(1, jnp.int32)
    begun = environment.begin(Prompts(tokens, zero + len(prompt), zero), jnp.zeros((1, 2), jnp.uint32))
    step = jax.jit(environment.step)

    def ask(state: Any, completion: Completion, began: int) -> tuple[Any, Completion, bool]:
        row = jnp.array([completion + (0,) * (config.max_new_tokens - len(completion))], jnp.int32)
        state, seen = step(begun if state is None else state, row, zero + began, zero + len(completion))
        seen = processes.fetch(seen)
        return state, tuple(seen.tokens[0, : seen.lengths[0]].tolist()), bool(seen.done[0])

    return ask


def _on_host(environment: HostEnvironment) -> Ask:
    def ask(turns: Any, completion: Completion, began: int) -> tuple[Any, Completion, bool]:
        turns, episode = [*(turns or []), completion[began:]], environment.begin(0, 0)
        answer = [episode.step(list(turn)).result() for turn in turns][-1]
        episode.end()
        return turns, tuple(answer.tokens), answer.ending != Ending.GOING

    return ask
