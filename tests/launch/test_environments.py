"""Environments that misbehave, in whole rollouts: each ends its own completion, or is an observation; no other differs.

The policy is random, and its tokens are bytes.
"""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from launch.data.batches import fixed_batches
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer
from launch.environments.joint import Joint
from launch.environments.processes import ProcessEpisodes
from launch.environments.token_environment import Reports, TokenEnvironment, turn_reader
from launch.evaluation.one_prompt import Answers
from launch.evaluation.sampler import Evaluate
from launch.setup.experiment import build_experiment
from models.decoder import init_decoder, make_policy
from specjax.drafters import NGramDrafter
from specjax.environments import Answer
from specjax.keys import seed_step
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rewards import environment_reward
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.types import Ending, Params, Prompts, Rollout
from tests.launch.programs import SMALLEST
from tests.launch.test_episodes import PLENTY_S
from tests.specjax import training
from tests.specjax.test_host_turns import FIELDS, OneAnswer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors in /proc")
SPEC = {"environment": "tests.launch.sample_environments:FaultyOnce"}
TOKENIZER, WIDTH, TURNS = ByteTokenizer(), 16, 4
VOCAB = TOKENIZER.vocab_size
# A row that hangs is given little time; the others have plenty.
HANGS, HANG_S = "hang", 0.5
IDS = "ids"
# The command of each problem; its ending, or its second observation, which goes on.
FAULTS: dict[str, Ending | bytes] = {
    "": b"2:",
    "raise no": Ending.FAILED,
    "raise exit": Ending.FAILED,
    "exit 3": Ending.FAILED,
    "kill it": Ending.FAILED,
    "scribble x": Ending.FAILED,
    "wrong number": Ending.FAILED,
    "wrong nan": Ending.FAILED,
    IDS: Ending.FAILED,
    HANGS: Ending.TIMED_OUT,
    "none": Ending.STOP,
    "print 100": b"printed",
    "letters x": b"x" * WIDTH,
    "say 1": b"1",
    "say ": b"",
}


class Environment(TokenEnvironment):
    """Episodes of FaultyOnce in processes; ids outside the vocabulary come from an episode in tokens."""

    def begin(self, problem: int, seed: int) -> Any:
        command = self.problems[problem].columns["fault"]
        return OneAnswer(Answer([1, VOCAB])) if command == IDS else super().begin(problem, seed)


class Limited:
    """Episodes with little time for problems that hang."""

    def __init__(self, short: ProcessEpisodes, plenty: ProcessEpisodes) -> None:
        self._short, self._plenty = short, plenty

    def begin(self, problem: dict[str, Any], seed: int) -> Any:
        hangs = problem["columns"]["fault"].startswith(HANGS)
        return (self._short if hangs else self._plenty).begin(problem, seed)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def episodes() -> Iterator[Limited]:
    with ExitStack() as stack:
        yield Limited(*(stack.enter_context(ProcessEpisodes(SPEC, limit, limit)) for limit in (HANG_S, PLENTY_S)))


def environment_of(episodes: Limited, commands: list[str]) -> Environment:
    """Return the environment of problems with these commands."""
    problems = [Problem(prompt="p", answer="", columns={"fault": command}) for command in commands]
    read, joint = turn_reader(TOKENIZER, TOKENIZER.stop_tokens, ()), Joint(TOKENIZER, limit=WIDTH, roles=("user",))
    return Environment(WIDTH, problems, episodes, read, joint, Reports("environment"))


@pytest.fixture(scope="module")
def rollouts(episodes: Limited, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rollout, Rollout, str]:
    """Return the rollout with all faults, one after it without any, and what was logged. Half of all ids are stops."""
    directory, log = tmp_path_factory.mktemp("hang"), io.StringIO()
    environment = environment_of(episodes, [f"hang {directory}/pid" if name == HANGS else name for name in FAULTS])
    config = RolloutConfig(
        group_size=1,
        max_new_tokens=128,
        draft_length=2,
        stop_tokens=(*TOKENIZER.stop_tokens, *range(1, 256, 2)),
        verifier="coupled",
        environment=environment,
        turns=TURNS,
        turn_tokens=20,
    )
    decoder = replace(training.DECODER, vocab_size=VOCAB)
    weights = jax.jit(lambda key: nn.unbox(init_decoder(decoder, key)))(jax.random.key(0))
    run: Any = make_generate(make_policy(decoder), NGramDrafter(VOCAB, 1, 2), config, make_mesh(MeshConfig()))
    rows = len(FAULTS)
    tokens = jnp.full((rows, 1), TOKENIZER.encode("p")[0], jnp.int32)
    prompts = Prompts(tokens, jnp.ones(rows, jnp.int32), jnp.arange(rows, dtype=jnp.int32))

    def generate() -> Rollout:
        return jax.device_get(run(Params(weights, {}), prompts, seed_step(0, 0)))

    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    faulty = generate()
    logging.getLogger().removeHandler(handler)
    run.environment = environment_of(episodes, [""] * rows)
    return faulty, generate(), log.getvalue()


def observations(rollout: Rollout, row: int) -> list[tuple[int, bytes]]:
    """Return where each observation began, and its text."""
    assert rollout.sampled is not None
    sampled = rollout.sampled[row, : rollout.lengths[row]].astype(np.int8)
    edges = np.flatnonzero(np.diff(sampled)) + 1
    return [
        (start, bytes(rollout.tokens[row, start:end].tolist()))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_without_faults_all_completions_have_all_turns(rollouts: tuple[Rollout, Rollout, str]) -> None:
    _, sound, _ = rollouts
    assert sound.ending is not None and sound.turns is not None and sound.returns is not None
    assert set(sound.ending.tolist()) == {Ending.TURNS} and set(sound.turns.tolist()) == {TURNS}
    assert set(sound.returns.tolist()) == {float(TURNS)}
    for row in range(len(FAULTS)):
        assert [text for _, text in observations(sound, row)] == [b"1:", b"2:", b"3:"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_completion_or_is_an_observation(rollouts: tuple[Rollout, Rollout, str], name: str) -> None:
    faulty, sound, _ = rollouts
    assert faulty.ending is not None and faulty.returns is not None and faulty.turns is not None
    row, expected = list(FAULTS).index(name), FAULTS[name]
    seen = observations(sound, row)
    same = until = int(faulty.lengths[row])
    if isinstance(expected, Ending):
        assert faulty.ending[row] == expected
        reward = 1.0 if expected == Ending.STOP else np.nan
        turns = 1 if name == IDS else 2
        assert name == HANGS or faulty.turns[row] == turns
        assert until in [start for start, _ in seen[: faulty.turns[row]]]
    else:
        assert faulty.ending[row] == Ending.TURNS and faulty.turns[row] == TURNS
        found = [text for _, text in observations(faulty, row)]
        assert found == [text for text in (b"1:", expected, b"3:") if text]
        same, reward = (until, 4.0) if expected == b"2:" else (seen[1][0], 3.0)
    np.testing.assert_equal(faulty.returns[row], np.float32(reward))
    np.testing.assert_array_equal(faulty.tokens[row, :same], sound.tokens[row, :same])


def test_completions_beside_faults_are_the_same(rollouts: tuple[Rollout, Rollout, str]) -> None:
    faulty, sound, _ = rollouts
    row = list(FAULTS).index("")
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(faulty, name)[row], getattr(sound, name)[row], err_msg=name)


def test_each_kind_of_failure_is_logged_once(rollouts: tuple[Rollout, Rollout, str]) -> None:
    *_, log = rollouts
    assert log.count("a completion has no reward") == 2 and log.count("no answer within 0.5 s") == 1
    assert log.count("an answer of 2 tokens, ids [1, 257]") == 1


def test_evaluations_and_answers_have_the_environment() -> None:
    """Evaluated problems have answers, and so rewards; a prompt of one's own has none."""
    options = {"environment.function": "tests.launch.sample_environments:Nines", "draft.kind": "none"}
    options |= {"rollout.stop_tokens": tuple(range(7)), "rollout.draft_length": 0, "rollout.max_new_tokens": 24}
    experiment = build_experiment(override(SMALLEST, options | {"rollout.turns": 2, "eval.samples": 2}))
    state: Any = SimpleNamespace(params=experiment.networks.params, drafting=None)
    (prompts,) = fixed_batches(experiment.held_out_prompts, 4)
    assert Evaluate(experiment, environment_reward, [prompts])(state).accuracy == 1.0
    texts = Answers(experiment)("1+1", 2, seed_step(0, 0))
    assert len(texts) == 2 and all("99999" in text for text in texts)
