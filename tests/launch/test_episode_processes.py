"""An environment's process touches no other episode, and nothing that it starts is left."""

import os
import resource
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
from launch.environments.limited import CLOSED, LimitedEpisode
from launch.environments.processes import ProcessEpisodes
from launch.errors import ConfigError
from launch.jobs.guarded import PRINTED_LINES
from tests.launch.processes import alive, gone
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


def text(episode: LimitedEpisode, turn: str) -> str:
    """Return the text that a step answers."""
    step = episode.step(turn).result()
    assert isinstance(step, Step) and isinstance(step.observation, str), step
    return step.observation


def number(episode: LimitedEpisode, turn: str) -> int:
    return int(text(episode, turn))


HOSTILE = {
    "exit": ("exit 3", "its process ended with exit code 3"),
    "killed": ("kill it", "its process ended by signal 9 (Killed)"),
    "group": ("kill its group", "its process ended by signal 9 (Killed)"),
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


def test_a_step_that_returns_twice_is_answered_once(episodes: ProcessEpisodes) -> None:
    episode = episodes.begin(problem(), 0)
    for turn in ("fork", "fork_raise") * 4:
        assert text(episode, turn) == "parent"
    assert episode.end().result() == 0.0


def test_a_forged_answer_reaches_no_later_call(episodes: ProcessEpisodes) -> None:
    episode = episodes.begin(problem(), 0)
    assert episode.step('forge [INDEX, null, ["x", 9.0, false]]').result() == Step("x", 9.0)
    assert episode.step("echo").result() == failed("its process sent a malformed message")
    assert episode.end().result() == failed("its process sent a malformed message")


@pytest.mark.parametrize(
    ("call_s", "episode_s", "reason"),
    [
        (LIMIT_S, PLENTY_S, "no answer within 2 s"),
        (PLENTY_S, LIMIT_S, "no answer within 2 s in all calls of the episode"),
    ],
)
def test_a_process_that_hangs_is_killed(call_s: float, episode_s: float, reason: str, tmp_path: Path) -> None:
    """It ignores SIGTERM."""
    with ProcessEpisodes(SPEC, call_s, episode_s) as episodes:
        late, other = episodes.begin(problem(), 0), episodes.begin(problem(), 1)
        pid = number(late, "pid")
        assert late.step(f"hang {tmp_path / 'pid'}").result() == Failure("timed_out", reason)
        assert gone([pid])
        assert late.step("echo").result() == late.end().result() == Failure("timed_out", reason)
        assert text(other, "echo") == "a 1 ['echo']" and other.end().result() == 0.0


@pytest.mark.parametrize("turn", ["kill the parent", "kill the parent's group"])
def test_a_parent_that_dies_ends_all_episodes_and_is_replaced(episodes: ProcessEpisodes, turn: str) -> None:
    first, second = episodes.begin(problem(), 0), episodes.begin(problem(), 1)
    pids = [number(first, "pid"), number(second, "pid"), number(second, "daemon"), number(second, "parent")]
    first.step(turn)
    assert first.end().result() == failed(LOST)
    assert second.step("echo").result() == second.end().result() == failed(LOST)
    assert gone(pids)
    third = episodes.begin(problem(), 2)
    assert text(third, "echo") == "a 2 ['echo']" and third.end().result() == 0.0


@pytest.mark.parametrize("ending", ["end", "exit 0", "kill it", "raise no", "close"])
def test_nothing_that_an_episode_started_outlives_it(episodes: ProcessEpisodes, ending: str) -> None:
    ended, other = episodes.begin(problem(), 0), episodes.begin(problem(), 1)
    pids, others = ([number(each, turn) for turn in ("pid", "daemon", "orphan")] for each in (ended, other))
    assert all(map(alive, [*pids, *others]))
    if ending != "end":
        ended.step(ending)
    ended.end().result()
    assert gone(pids) and all(map(alive, others))
    assert other.end().result() == 0.0 and gone(others)


def test_processes_import_nothing_heavy_and_share_no_descriptors(episodes: ProcessEpisodes) -> None:
    begun = [episodes.begin(problem(), seed) for seed in range(32)]
    assert [text(begun[0], f"imported {name}") for name in ("sys", "jax", "numpy", "asyncio")] == [
        *("True", "False", "False", "False")
    ]
    first, *others = [number(episode, "descriptors") for episode in begun]
    assert others == [first] * 31
    before = len(os.listdir("/proc/self/fd"))
    assert [episode.end().result() for episode in begun] == [0.0] * 32
    # A socket is closed after its last call is answered; another call shows that this has happened.
    assert text(last := episodes.begin(problem(), 0), "echo") and last.end().result() == 0.0
    assert text(episodes.begin(problem(), 0), "echo")
    assert len(os.listdir("/proc/self/fd")) == before - 31


def test_random_numbers_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    lines = (
        "import random, numpy",
        "class Draws:",
        "    def step(self, turn): return f'{random.random()} {numpy.random.random()}'",
    )
    (tmp_path / "draws.py").write_text("\n".join(lines))
    with ProcessEpisodes({"environment": "draws:Draws"}, PLENTY_S, PLENTY_S) as episodes:
        first, same, other = [text(episodes.begin(problem(), seed), "x").split() for seed in (0, 0, -1)]
    assert first == same and first[0] != other[0] and first[1] != other[1]


def test_prints_are_cut_and_labelled(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessEpisodes(SPEC, PLENTY_S, PLENTY_S) as episodes:
        begun = [episodes.begin(problem(), seed) for seed in range(2)]
        assert [text(episode, f"print {10**6}") for episode in begun] == ["printed"] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == PRINTED_LINES + 1
    assert all(line.startswith(f"environment.function = {SPEC['environment']}: print") for line in said)
    assert capfd.readouterr() == ("", "")


def test_closing_answers_all_calls_and_ends_all_processes(tmp_path: Path) -> None:
    episodes = ProcessEpisodes(SPEC, PLENTY_S, PLENTY_S)
    begun = [episodes.begin(problem(), seed) for seed in range(4)]
    pids = [number(episode, turn) for episode in begun for turn in ("pid", "daemon")]
    pids += [number(begun[0], "parent")]
    answers: list[Future[Any]] = [episode.step(f"hang {tmp_path / 'pid'}") for episode in begun]
    answers += [episode.end() for episode in begun]
    answers += [episodes.begin(problem(), 0).end()]
    episodes.close()
    assert not any(map(alive, pids))
    assert [answer.result() for answer in answers] == [failed(CLOSED)] * 9
    assert begun[0].step("echo").result() == episodes.begin(problem(), 0).end().result() == failed(CLOSED)


@pytest.mark.parametrize("ending", ["exits", "is killed"])
def test_no_process_outlives_the_program(ending: str, tmp_path: Path) -> None:
    program = f"""
        import os, signal, time
        from pathlib import Path
        from launch.environments.processes import ProcessEpisodes
        episodes = ProcessEpisodes({SPEC!r}, 60, 60)
        episode = episodes.begin({problem()!r}, 0)
        print(*(episode.step(turn).result().observation for turn in ("pid", "parent", "daemon", "orphan")))
        episode.step("hang {tmp_path / "pid"}")
        while not Path({str(tmp_path / "pid")!r}).exists():
            time.sleep(0.01)
        if {ending!r} == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 4 and gone(pids)
    assert (ended.returncode, ended.stderr) == (0 if ending == "exits" else -signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        ({"environment": "no_such_module:f"}, "environment.function = no_such_module:f: ModuleNotFoundError"),
        ({"environment": "episodes_own:missing"}, "environment.function = episodes_own:missing: AttributeError"),
        ({"environment": "exits:f"}, "environment.function = exits:f: SystemExit: 3"),
        ({"environment": "dies:f"}, "environment.function = dies:f: its process died while it was imported; must be"),
        ({"tools": ["episodes_own:f", "dies:f"], "calls": "hermes"}, "environment.tools = dies:f: its process died"),
        ({"tools": ["episodes_own:f", "exits:f"], "calls": "hermes"}, "environment.tools = exits:f: SystemExit: 3"),
    ],
)
def test_a_function_without_import_is_refused(
    spec: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module, line in {"exits": "exit(3)", "dies": "os._exit(0)", "episodes_own": "def f(): pass"}.items():
        (tmp_path / f"{module}.py").write_text(f"import os\n{line}\n")
    with refuses(refusal, ConfigError):
        ProcessEpisodes(spec, PLENTY_S, PLENTY_S)


def test_a_module_that_cannot_be_imported_again_fails_episodes_until_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from tests.launch.sample_environments import ByCommand\n"
    (tmp_path / "changing.py").write_text(source)
    with ProcessEpisodes({"environment": "changing:ByCommand"}, PLENTY_S, PLENTY_S) as episodes:
        (tmp_path / "changing.py").write_text("raise ValueError('no')")
        begun = [episodes.begin(problem(), seed) for seed in range(3)]
        assert begun[0].step("kill the parent").result() == failed(LOST)
        (kind, reason) = episodes.begin(problem(), 0).step("echo").result()
        assert kind == "failed" and reason.startswith("environment.function = changing:ByCommand: ValueError: no")
        (tmp_path / "changing.py").write_text(source + "\n")
        assert text(episodes.begin(problem(), 0), "echo") == "a 0 ['echo']"


def test_a_server_that_a_module_starts_outlives_episodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    lines = (
        "import subprocess",
        "from tests.launch.sample_environments import ByCommand",
        "class WithServer(ByCommand):",
        "    server = subprocess.Popen(['sleep', '600'])",
        "    def _server(self, argument): return str(self.server.pid)",
    )
    (tmp_path / "with_server.py").write_text("\n".join(lines))
    with ProcessEpisodes({"environment": "with_server:WithServer"}, PLENTY_S, PLENTY_S) as episodes:
        first, second = episodes.begin(problem(), 0), episodes.begin(problem(), 0)
        server, daemon = number(first, "server"), number(first, "daemon")
        assert first.end().result() == 0.0 and gone([daemon])
        assert number(second, "server") == server and alive(server)
    assert gone([server])


def test_too_many_open_files_fail_only_the_episodes_that_get_none(episodes: ProcessEpisodes) -> None:
    first, (soft, hard) = episodes.begin(problem(), 0), resource.getrlimit(resource.RLIMIT_NOFILE)
    text(first, "echo")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        begun = [episodes.begin(problem(), 0) for _ in range(32)]
        answers = [episode.step("echo").result() for episode in begun]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    too_many = failed("too many open files: raise the limit of this process (ulimit -n)")
    assert {*answers} == {too_many, Step("a 0 ['echo']")}
    assert {episode.end().result() for episode in [first, *begun]} == {0.0, too_many}
    assert text(episodes.begin(problem(), 1), "echo") == "a 1 ['echo']"
