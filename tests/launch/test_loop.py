"""The training loop with steps that only record their calls, and the timer of steps."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.tiny import config as tiny
from launch.errors import RunStopped
from launch.evaluation.sampler import Evaluation
from launch.run.logs import RunLogs, check_lag
from launch.run.loop import TrainingLoop
from launch.run.start import Start, Steps
from launch.run.step_timer import DispatchedStep, StepTimer
from specjax.asynchronous.step import MixedVersions
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.refusals import refuses


class Recorder:
    """A loop whose parts record their calls: (what, step)."""

    def __init__(self, directory: Path, start_step: int = 0, **options: Any) -> None:
        self.done: list[tuple[str, int]] = []
        self.said: list[tuple[int, str]] = []
        self.scores: list[float | None] = []
        config = replace(
            tiny,
            **{"steps": 4, "probe_every": 0, "profile_step": 0} | options.pop("run", {}),
            warmup=replace(tiny.warmup, steps=0),
            distill=replace(tiny.distill, steps=0),
            rollout=replace(tiny.rollout, draft_lengths=()),
            eval=replace(tiny.eval, every=options.pop("eval_every", 0)),
            checkpoint=replace(tiny.checkpoint, every=options.pop("save_every", 0), best="eval/accuracy"),
        )
        cut: Any = SimpleNamespace(evaluated=lambda number, share: None)
        self.signals, self.skipped = SimpleNamespace(received=None), SimpleNamespace(reason=None, in_a_row=0)
        self.on: dict[tuple[str, int], Any] = options.pop("on", {})
        probe: Any = self._step("probe")
        probe.rehearse = self._step("rehearse")
        events: Any = SimpleNamespace(
            warn=lambda number, text: self.said.append((number, text)),
            record_warning=lambda number, text: self.said.append((number, text)),
            record_checkpoint=lambda number: None,
        )
        self.sampled: list[int] = []
        samples: Any = SimpleNamespace(
            due=lambda number, last: last, write=lambda number, *_: self.sampled.append(number)
        )
        unused: Any = None
        fakes: Any = SimpleNamespace(
            experiment=SimpleNamespace(
                config=config,
                mesh=make_mesh(MeshConfig()),
                phases=(),
                draft_vocabulary=None,
                checksum=0,
                networks=SimpleNamespace(base_hash=None),
                teacher=None,
            ),
            pipeline=SimpleNamespace(__next__=None),
            saves=SimpleNamespace(save=self._save, newest=lambda: None),
            signals=self.signals,
            skipped=self.skipped,
            long_phases=SimpleNamespace(remove=lambda: self.removed.append(self.number)),
        )
        logs = RunLogs(directory, events, samples, StepTimer(self._log), fakes.skipped, cut, fakes.signals)
        state: Any = SimpleNamespace(params=None, drafting=None, ahead=(), carried=None)
        self.loop = TrainingLoop(
            fakes.experiment,
            Start(state, start_step, None),
            Steps(self._step("train"), None, probe),
            Prompts(),  # pyright: ignore[reportArgumentType]
            self._evaluation(),
            unused,
            fakes.saves,
            logs,
            fakes.long_phases,
        )
        self.number, self.removed = start_step, list[int]()

    def _do(self, what: str, number: int) -> None:
        self.done.append((what, number))
        self.on.get((what, number), lambda _: None)(self)

    def _step(self, what: str) -> Any:
        def step(state: Any, prompts: Any) -> Any:
            self.number += 1
            self._do(what, self.number)
            timed = {} if what == "train" else {"time/step": 2.0}
            if what == "probe":
                timed["perf/speedup_vs_autoregressive"] = 0.5
            return state, SimpleNamespace(), {"reward/mean": jnp.zeros(())} | timed

        return step

    def _log(self, number: int, metrics: Any) -> dict[str, Any]:
        self._do("log", number)
        return dict(metrics)

    def _evaluation(self) -> Any:
        def evaluate(state: Any) -> Evaluation:
            self._do("evaluate", self.number)
            return Evaluation(accuracy=0.25, truncated=0.5)

        return evaluate

    def _save(self, number: int, state: Any, data: Any, extra: Any, score: float | None, healthy: bool) -> None:
        assert healthy
        self.scores.append(score)
        self._do("save", number)


class Prompts:
    def __next__(self) -> None:
        time.sleep(0.001)

    def get_state(self) -> dict[str, Any]:
        return {}


def test_the_work_after_a_step_is_in_order(tmp_path: Path):
    run = Recorder(tmp_path, eval_every=2, save_every=3)
    run.loop.run()
    expected = [("train", 1), ("train", 2), ("log", 1), ("evaluate", 2), ("log", 2), ("train", 3), ("log", 3)]
    expected += [("save", 3), ("train", 4), ("evaluate", 4), ("log", 4), ("save", 4)]
    assert run.done == expected
    # The best save is by `eval/accuracy`, which step 3 did not measure.
    assert run.scores == [None, 0.25]


def test_a_rollout_of_mixed_versions_ends_the_run_in_one_line(tmp_path: Path):
    def mix(run: Recorder) -> None:
        raise MixedVersions("a rollout was generated by two versions")

    with refuses("step 2: a rollout was generated by two versions", RunStopped):
        Recorder(tmp_path, on={("train", 2): mix}).loop.run()


@pytest.mark.parametrize(("number", "found", "wanted"), [(2, 0, 1), (5, 1, 2), (5, 3, 2)])
def test_a_rollout_by_other_networks_than_the_lag_asks_for_ends_the_run_in_one_line(
    number: int, found: int, wanted: int
):
    def step(lag: int) -> Any:
        return SimpleNamespace(number=number, metrics={"asynchronous/lag": np.int32(lag)})

    check_lag(2, step(wanted))
    updates = number - 1
    said = f"step {number}: ...after update {updates - found}...asynchronous.lag = 2...after update {updates - wanted}"
    with refuses(said, RunStopped):
        check_lag(2, step(found))


def test_a_probe_is_rehearsed_and_its_time_includes_its_prompts(tmp_path: Path):
    run = Recorder(tmp_path, run={"probe_every": 3})
    seen: dict[int, Any] = {}
    run.loop.logs.timer._observers = (lambda step: seen.update({step.number: step.metrics}),)
    run.loop.run()
    assert [step for step in run.done if step[0] != "log"] == [
        ("train", 1),
        ("rehearse", 2),
        ("probe", 3),
        ("train", 4),
    ]
    # Pending steps are logged before a step that times itself.
    assert run.done.index(("log", 1)) < run.done.index(("rehearse", 2)) < run.done.index(("log", 2))
    for number in (2, 3):
        assert seen[number]["time/step"] == 2.0 + seen[number]["time/data"] and seen[number]["time/data"] >= 0.001
        assert seen[number]["memory/host_gib"] <= seen[number]["memory/host_peak_gib"] < 1000


def stop(run: Recorder) -> None:
    run.signals.received = signal.SIGTERM


def give_up(run: Recorder) -> None:
    run.skipped.reason = "step 2: skipped"


@pytest.mark.parametrize("why", [stop, give_up])
@pytest.mark.parametrize("every", [0, 100])
def test_a_run_that_must_stop_ends_after_its_step_and_saves(tmp_path: Path, why: Any, every: int):
    run = Recorder(tmp_path, save_every=every, on={("train", 2): why})
    run.loop.run()
    saved = [("save", 2)] if every else []
    assert run.done == [("train", 1), ("train", 2), ("log", 1), ("log", 2), *saved]
    assert run.sampled == [2]
    assert run.said[0][1].startswith("stopped after step 2; ") and ("--resume" in run.said[0][1]) == bool(every)
    assert run.said[1:] == ([(2, "step 2: skipped")] if why is give_up else [])


def test_a_signal_during_a_save_stops_the_step_after_it(tmp_path: Path):
    """Otherwise step 2 would not be saved and would be lost."""
    run = Recorder(tmp_path, save_every=100, on={("evaluate", 2): lambda _: None, ("log", 2): stop}, eval_every=0)
    run.loop.run()
    assert [number for what, number in run.done if what == "save"] == [3] and run.done[-2] == ("log", 3)


def test_a_run_resumes_after_its_last_step_and_traces_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Recorder(tmp_path, start_step=2, run={"profile_step": 3})
    run.loop.run()
    assert [number for what, number in run.done if what == "train"] == [3, 4]
    assert list((tmp_path / "profile").glob("**/*.xplane.pb"))
    Recorder(tmp_path, start_step=3, run={"profile_step": 3}).loop.run()
    assert "profile_step = 3:" in capsys.readouterr().out


def test_the_state_before_the_first_step_is_saved(tmp_path: Path):
    run = Recorder(tmp_path, save_every=100)
    config = run.loop.experiment.config
    run.loop.experiment.config = replace(config, warmup=replace(config.warmup, steps=1))  # pyright: ignore[reportAttributeAccessIssue]
    run.loop.run()
    assert run.done[0] == ("save", 0) and ("save", 4) in run.done


def test_warm_up_states_are_removed_after_the_first_checkpoint(tmp_path: Path):
    """It is also removed when the run ends. Without a checkpoint it must survive a signal."""
    run = Recorder(tmp_path, save_every=100)
    run.loop.saves.newest = lambda: 0  # pyright: ignore[reportAttributeAccessIssue]
    run.loop.run()
    assert run.removed[0] == 1
    for why, removed in ((None, [4]), (stop, [])):
        run = Recorder(tmp_path, save_every=0, on={} if why is None else {("train", 2): why})
        run.loop.run()
        assert run.removed == removed


def test_a_step_that_ends_within_its_call_is_timed_separately():
    logged: dict[int, float] = {}

    def log(number: int, metrics: Any) -> dict[str, float | None]:
        logged[number] = metrics["time/step"]
        return {}

    timer, ready, nothing = StepTimer(log), jax.block_until_ready(jnp.zeros(())), SimpleNamespace()
    for number, seconds in ((1, 0.2), (2, 0.1)):
        begin = time.perf_counter()
        time.sleep(seconds)
        step: Any = DispatchedStep(number, begin, {"reward/mean": ready}, nothing, nothing)  # pyright: ignore[reportArgumentType]
        timer.dispatched(step)
    assert set(logged) == {1}
    timer.finish()
    assert 0.2 <= logged[1] < 0.3 and 0.1 <= logged[2] < 0.2


def test_after_a_signal_before_the_first_step_no_step_is_taken(tmp_path: Path):
    run = Recorder(tmp_path, start_step=2, save_every=100)
    run.signals.received = signal.SIGTERM
    run.loop.run()
    assert [step for step in run.done if step[0] != "log"] == []
    assert run.said[0][1].startswith("stopped after step 2; ")
