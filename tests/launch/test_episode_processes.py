"""What an environment does to its process touches no other episode, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from launch.environments.answers import Failure, Step
from launch.environments.episodes import Episode
from launch.environments.limited import CLOSED
from launch.environments.processes import ProcessEpisodes
from launch.errors import ConfigError
from launch.jobs.guarded import PRINTED_LINES
from tests.launch.processes import alive, children, gone
from tests.launch.test_episodes import PLENTY_S, ROOT, failed, problem
from tests.refusals import refuses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
SPEC = {"environment": "tests.launch.sample_environments:ByCommand"}
LIMIT_S = 2.0
LOST = "the process that forks the environments died"


@pytest.fixture(scope="module")
def episodes() -> Iterator[ProcessEpisodes]:
    with ProcessEpisodes(SPEC, PLENTY_S, PLENTY_S) as episodes:
        yield episodes


def text(episode: Episode, turn: str) -> str:
    """Return the text that a step answers."""
    step = episode.step(turn).result()
    assert isinstance(step, Step) and isinstance(step.observation, str), step
    return step.observation


def number(episode: Episode, turn: str) -> int:
    return int(text(episode, turn))


HOSTILE = {
    "exit": ("exit 3", "its process ended with exit code 3"),
    "groups": ("kill_groups", "by signal 9 (Killed)"),
    "closed": ("close", "its process ended with exit code 1"),
    "text": ("scribble x", "its process sent a malformed message"),
    "zeros": ("scribble " + "\0" * 8, "its process sent a malformed message"),
    "null": ("scribble null", "its process sent a malformed message"),
    "foreign": ('scribble [1, null, ["x", 9.0, false]]', "its process sent a malformed message"),
    "reward": ('forge [INDEX, null, ["x", NaN, false]]', "its process sent a malformed message"),
    "observation": ('forge [INDEX, null, [["x"], 1.0, false]]', "its process sent a malformed message"),
    "short": ("forge [INDEX, null, 1.0]", "its process sent a malformed message"),
    "deep": ("scribble " + "[" * 10**5, "its process sent a malformed message"),
    "flood": ("flood", "its process sent a message of more than 8065536 bytes"),
}


@pytest.mark.parametrize(("turn", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_process_that_misbehaves_ends_its_episode_only(episodes: ProcessEpisodes, turn: str, reason: str) -> None:
    other, episode = episodes.begin(problem(end="number 1"), 0), episodes.begin(problem(), 1)
    pid = number(episode, "pid")
    kind, said = episode.step(turn).result()
    assert kind == "failed" and reason in said
    assert episode.step("echo").result() == episode.end().result() == (kind, said)
    assert gone([pid])
    assert text(other, "echo") == "a 0 ['echo']" and other.end().result() == 1.0
