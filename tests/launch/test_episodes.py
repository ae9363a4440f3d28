"""LimitedEpisodes of environments on the host, in threads of this process and in processes of their own."""

import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from launch.environments.answers import Failure, Step, TextEnvironment
from launch.environments.limited import CLOSED, OVER, LimitedEpisodes
from launch.environments.processes import ProcessEpisodes
from launch.environments.threads import ThreadEpisodes
from tests.launch import sample_environments

ROOT = Path(__file__).parents[2]
PLENTY_S = 60.0
MUST_BE_MESSAGES = 'must be text, or messages of JSON with "role" and "content"'

Start = Callable[[str], LimitedEpisodes]


@pytest.fixture(scope="module", params=["threads", "processes"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return a function from the name of an environment to its episodes. They are shared, and closed at the end."""
    started: dict[str, Any] = {}

    def start(name: str) -> LimitedEpisodes:
        if name not in started:
            if request.param == "threads":
                started[name] = ThreadEpisodes(getattr(sample_environments, name), PLENTY_S, PLENTY_S)
            else:
                spec = {"environment": f"tests.launch.sample_environments:{name}"}
                started[name] = ProcessEpisodes(spec, PLENTY_S, PLENTY_S)
        return started[name]

    yield start
    for episodes in started.values():
        episodes.close()


@pytest.fixture
def episodes(start: Start) -> LimitedEpisodes:
    return start("ByCommand")


def problem(**columns: str) -> dict[str, Any]:
    return {"prompt": "p", "answer": "a", "columns": columns}


def failed(reason: str) -> Failure:
    return Failure("failed", reason)


def test_an_environment_gets_the_problem_the_seed_and_all_turns(episodes: LimitedEpisodes) -> None:
    first, second = episodes.begin(problem(), 7), episodes.begin(problem() | {"answer": "é\n"}, 2**40)
    assert first.step("echo 1").result() == Step("a 7 ['echo 1']")
    assert second.step("echo 1").result() == Step("é\n 1099511627776 ['echo 1']")
    assert first.step("echo 2").result() == Step("a 7 ['echo 1', 'echo 2']")
    assert first.end().result() == second.end().result() == 0.0


def test_answers_are_steps(episodes: LimitedEpisodes) -> None:
    episode = episodes.begin(problem(end="number -2"), 0)
    # Calls that are made before the last one is answered wait for it.
    answers = [episode.step(turn) for turn in ("none", "reward 0.5", "letters é", "messages")]
    none, reward, long, messages = [answer.result() for answer in answers]
    assert none == Step(done=True) and reward == Step(reward=0.5, done=True)
    assert long == Step("é" * 1_000_000)
    # As JSON has it, and without what UTF-8 cannot encode.
    assert messages == Step([{"role": "tool", "content": [1, "é?"]}], 2.0)
    assert episode.end().result() == -2.0
    assert episode.step("none").result() == episode.end().result() == failed(OVER)


def test_begin_and_end_may_be_missing(start: Start) -> None:
    episode = start("WithoutBeginAndEnd").begin(problem(), 0)
    assert episode.step("x").result() == Step("x") and episode.end().result() == 0.0


def test_the_problem_of_other_episodes_stays_as_it_is(episodes: LimitedEpisodes) -> None:
    given = problem()
    episode = episodes.begin(given, 0)
    assert episode.step("change").result() == Step() and given == problem()
    assert episode.end().result() == 0.0
    with pytest.raises(TypeError, match="not JSON serializable"):
        episodes.begin({"prompt": object()}, 0)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("raise no", "ValueError: no"),
        ("raise exit", "SystemExit: exit"),
        ("raise interrupt", "KeyboardInterrupt: interrupt"),
        ("unknown", "AttributeError: 'ByCommand' object has no attribute '_unknown'"),
    ],
)
def test_an_exception_is_the_answer_to_all_later_calls(
    episodes: LimitedEpisodes, turn: str, reason: str, tmp_path: Path
) -> None:
    """The environment is told of the end all the same."""
    episode, untold = episodes.begin(problem(end=f"touch {tmp_path / 'told'}"), 0), tmp_path / "untold"
    assert episode.step(turn).result() == episode.step(f"touch {untold}").result() == failed(reason)
    assert not (tmp_path / "told").exists()
    assert episode.end().result() == failed(reason)
    assert (tmp_path / "told").exists() and not untold.exists()


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("wrong tuple", "step returned tuple: ('text', 1.0, False); must return a Step, text, or None at the end"),
        ("wrong number", "step returned float: 1.0; must return a Step, text, or None at the end"),
        ("wrong nan", "step: reward = nan; must be a finite number"),
        ("wrong reward", "step: reward = '1.0'; must be a finite number"),
        ("wrong none", "step: reward = None; must be a finite number"),
        ("wrong done", "step: done = 'no'; must be True or False"),
        ("wrong observation", f"step: observation = 3; {MUST_BE_MESSAGES}"),
        ("wrong messages", f"step: observation = [{{'content': 'without a role'}}]; {MUST_BE_MESSAGES}"),
        ("wrong long", "step: the observation has 9000002 bytes; must have at most 8000000"),
    ],
)
def test_a_wrong_answer_is_a_failure_that_says_what_is_allowed(
    episodes: LimitedEpisodes, turn: str, reason: str
) -> None:
    episode = episodes.begin(problem(), 0)
    assert episode.step(turn).result() == episode.end().result() == failed(reason)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("wrong object", f"step: observation = .*: Object of type object is not JSON serializable; {MUST_BE_MESSAGES}"),
        ("wrong deep", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_an_observation_that_json_cannot_hold_is_a_failure(episodes: LimitedEpisodes, turn: str, reason: str) -> None:
    episode = episodes.begin(problem(), 0)
    said = episode.step(turn).result()
    assert isinstance(said, Failure) and re.match(reason, said.reason)
    assert episode.end().result() == said


def test_a_failure_of_the_beginning_or_the_end_is_an_answer(start: Start) -> None:
    begun = start("ByCommand").begin(problem(begin="raise no"), 0)
    assert begun.step("none").result() == begun.end().result() == failed("ValueError: no")
    for command, reason in (("raise no", "ValueError: no"), ("wrong messages", "end returned Step(observation=")):
        said = start("ByCommand").begin(problem(end=command), 0).end().result()
        assert isinstance(said, Failure) and said.reason.startswith(reason)
    unmade = start("unmade").begin(problem(), 0)
    assert unmade.step("none").result() == unmade.end().result() == failed("RuntimeError: cannot be made")
    number = start("not_an_environment").begin(problem(), 0)
    assert number.step("none").result() == failed("AttributeError: 'int' object has no attribute 'step'")
    returned = start("BeginsWithText").begin(problem(), 0)
    assert returned.end().result() == failed("begin returned str: 'hello'; must return nothing")


def test_episodes_run_beside_each_other(episodes: LimitedEpisodes, tmp_path: Path) -> None:
    """Each step waits for all the others."""
    begun = [episodes.begin(problem(), seed) for seed in range(16)]
    met = [episode.step(f"meet {tmp_path} 16") for episode in begun]
    assert [answer.result() for answer in met] == [Step("met")] * 16
    assert [episode.end().result() for episode in begun] == [0.0] * 16


class Waiting(TextEnvironment):
    """Answers once `go` is set; "at once" at once."""

    go, waits = threading.Event(), threading.Semaphore(0)

    def step(self, turn: str) -> str:
        if turn != "at once":
            self.waits.release()
            self.go.wait()
        return turn


def test_a_thread_that_does_not_answer_in_time_is_left_over() -> None:
    with ThreadEpisodes(Waiting, call_s=0.5, episode_s=PLENTY_S) as episodes:
        late, other = episodes.begin(problem(), 0), episodes.begin(problem(), 0)
        expected = Failure("timed_out", "no answer within 0.5 s")
        assert late.step("x").result() == late.step("at once").result() == late.end().result() == expected
        assert other.step("at once").result() == Step("at once") and other.end().result() == 0.0
    with ThreadEpisodes(Waiting, call_s=PLENTY_S, episode_s=0.5) as episodes:
        expected = Failure("timed_out", "no answer within 0.5 s in all calls of the episode")
        assert episodes.begin(problem(), 0).step("x").result() == expected
    Waiting.go.set()


def test_closing_answers_all_calls_of_threads() -> None:
    Waiting.go.clear()
    episodes = ThreadEpisodes(Waiting, PLENTY_S, PLENTY_S)
    begun = [episodes.begin(problem(), 0) for _ in range(4)]
    answers: list[Future[Any]] = [episode.step("x") for episode in begun]
    for _ in begun:
        Waiting.waits.acquire()
    answers += [episode.end() for episode in begun]
    episodes.close()
    episodes.close()
    late = episodes.begin(problem(), 0)
    assert [answer.result() for answer in (*answers, late.step("x"), late.end())] == [failed(CLOSED)] * 10
    Waiting.go.set()


def test_a_thread_that_hangs_does_not_keep_the_program() -> None:
    program = """
        import threading
        from launch.environments.threads import ThreadEpisodes
        class Hangs:
            def step(self, turn):
                reached.set()
                threading.Event().wait()
        reached = threading.Event()
        ThreadEpisodes(Hangs, 60, 60).begin({}, 0).step("x")
        reached.wait()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
