"""The game that the recipe `guessing` learns, in text and in JAX."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.train
from launch.cli.options import parse_run
from launch.data.responses import worked_solutions
from launch.data.tokenizers import ByteTokenizer
from launch.environments.answers import Step
from launch.environments.build import environment_of
from launch.environments.guessing import BELOW, LETTERS, TextGuessing
from launch.environments.token_environment import TokenEnvironment
from launch.environments.traced_guessing import Guessing, problems
from launch.setup.problems import build_problems
from specjax.environments import Observation
from specjax.types import Prompts

STOP = 256
IN_TEXT = "--environment.function launch.environments.guessing:TextGuessing".split()


def search(seed: int) -> list[tuple[str, Step]]:
    """Return the guesses of a binary search in text, with their answers."""
    game, low, high = TextGuessing(), 0, len(LETTERS)
    game.begin({}, seed)
    played = list[tuple[str, Step]]()
    while not played or not played[-1][1].done:
        middle = (low + high) // 2
        played.append((LETTERS[middle], game.step(LETTERS[middle])))
        low, high = (low, middle) if played[-1][1].observation == BELOW else (middle + 1, high)
    return played


def answers_in_jax(secrets: list[str], turns: list[bytes]) -> Observation:
    """Return the answers to a turn of each game."""
    rows = [[*b"??", *turn, STOP, *b"?????"][:8] for turn in turns]
    start = jnp.full(len(turns), 2)
    state = jnp.array([ord(secret) for secret in secrets])
    end = start + 1 + jnp.array([len(turn) for turn in turns])
    kept, seen = jax.jit(Guessing().step)(state, jnp.array(rows), start, end)
    np.testing.assert_array_equal(kept, state)
    return jax.device_get(seen)


def test_binary_search_finds_every_letter_in_four_guesses_and_jax_answers_as_text_does():
    games = [search(seed) for seed in range(100)]
    assert {game[-1][0] for game in games} == set(LETTERS)
    assert max(map(len, games)) == 4 and all(game[-1][1].reward == 1.0 for game in games)
    played = [(game[-1][0], guess, step) for game in games for guess, step in game]
    seen = answers_in_jax([secret for secret, *_ in played], [guess.encode() for _, guess, _ in played])
    for row, (_, _, step) in enumerate(played):
        assert (seen.done[row], seen.reward[row]) == (step.done, step.reward)
        assert step.done or chr(seen.tokens[row, 0]) == step.observation
    assert seen.lengths.tolist() == [1] * len(played)


def test_a_turn_that_is_no_letter_ends_the_game_without_reward():
    turns = ["", "cc", "hh", "b", "r", "<", "é"]
    for turn in turns:
        game = TextGuessing()
        game.begin({}, 0)
        assert game.step(turn) == Step(done=True)
    seen = answers_in_jax(["h"] * len(turns), [turn.encode() for turn in turns])
    assert seen.done.all() and not seen.reward.any()


def test_secrets_follow_from_keys_and_are_evenly_spread():
    prompts = Prompts(*(jnp.zeros(shape, jnp.int32) for shape in ((1500, 1), 1500, 1500)))
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 1500))
    secrets = np.asarray(Guessing().begin(prompts, keys))
    np.testing.assert_array_equal(Guessing().begin(prompts, keys[::-1]), secrets[::-1])
    counts = np.unique_counts(secrets)
    assert "".join(map(chr, counts.values)) == LETTERS and 60 < counts.counts.min() <= counts.counts.max() < 140


def test_prompts_have_the_form_of_answers():
    train, held_out = problems(0)
    prompts = [problem.prompt for problem in (*train, *held_out)]
    assert prompts[:2] == ["100:b>r<", "101:r<b>"] and len(set(prompts)) == len(prompts)
    assert {problem.solution for problem in train} == set(LETTERS)


@pytest.mark.parametrize("options, kind", [([], Guessing), (IN_TEXT, TokenEnvironment)])
def test_the_recipe_is_accepted(options: list[str], kind: type):
    config, tokenizer = parse_run(["guessing", *options], "", ""), ByteTokenizer()
    (train, _), environments = build_problems(config), environment_of(config, tokenizer)
    assert environments is not None and config.model.architecture is not None
    assert isinstance(environments(train), kind) and environments(train).width == 1
    length = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    solutions = worked_solutions(train, tokenizer, length, config.model.architecture.vocab_size)
    assert set(solutions.completions.tolist()) == {*LETTERS.encode(), STOP}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], IN_TEXT])
def test_a_shortened_run_learns_over_turns(options: list[str], tmp_path: Path):
    short = f"--out {tmp_path}/run --steps 120 --eval.every 0 --checkpoint.every 0 --draft.kind none".split()
    assert launch.train.main(["guessing", *short, *"--rollout.draft-length 0".split(), *options]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1
