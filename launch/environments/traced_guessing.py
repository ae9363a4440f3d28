"""The game of `launch.environments.guessing` in JAX, and its problems."""

import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from launch.data.problems import Problem
from launch.environments.guessing import ABOVE, BELOW, LETTERS
from specjax.environments import Observation
from specjax.types import Prompts

TRAINING, HELD_OUT = 800, 100


@dataclass(frozen=True)
class Guessing:
    """The game on the ids of the tokenizer `bytes`. The key of a sequence determines its secret."""

    width: int = 1

    def begin(self, prompts: Prompts, keys: UInt32[Array, "B 2"]) -> Int[Array, "B"]:
        """Return the secrets, as ids."""
        first, last = ord(LETTERS[0]), ord(LETTERS[-1])
        return jax.vmap(lambda key: jax.random.randint(key, (), first, last + 1))(jax.random.wrap_key_data(keys))

    def step(
        self, state: Int[Array, "B"], tokens: Int[Array, "B C"], start: Int[Array, "B"], end: Int[Array, "B"]
    ) -> tuple[Int[Array, "B"], Observation]:
        """Return the secrets and the answers to guesses."""
        guess = jnp.take_along_axis(tokens, start[:, None], axis=1, mode="clip")[:, 0]
        is_letter = (guess >= ord(LETTERS[0])) & (guess <= ord(LETTERS[-1])) & (end - start == 2)  # with a stop token
        right = is_letter & (guess == state)
        answer = jnp.where(state < guess, ord(BELOW), ord(ABOVE)).astype(jnp.int32)
        count = jnp.ones_like(guess)
        return state, Observation(answer[:, None], count, right | ~is_letter, right.astype(jnp.float32))


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return training problems and held-out ones. Prompts differ by their number and by which limit comes first.

    Solutions are random letters. They teach a warm-up that a turn is one letter, and nothing about which.
    """
    draw = random.Random(seed)
    limits = f"{chr(ord(LETTERS[0]) - 1)}{ABOVE}", f"{chr(ord(LETTERS[-1]) + 1)}{BELOW}"
    prompts = [
        f"{number}:{limits[number % 2]}{limits[1 - number % 2]}" for number in range(100, 100 + TRAINING + HELD_OUT)
    ]
    found = [Problem(prompt=prompt, answer="", solution=draw.choice(LETTERS)) for prompt in prompts]
    return found[:TRAINING], found[TRAINING:]
