"""Options of `launch.trainer.train`, without training."""

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import launch.data.problem_list as problem_list
import launch.trainer
from configs.override import override
from configs.schema import RunConfig
from configs.tiny import config as tiny
from launch.errors import ConfigError
from launch.setup.experiment import Experiment
from launch.setup.problems import build_problems
from launch.trainer import TrainedRun, train
from tests.refusals import refuses


def score(completion: str, answer: str) -> float:
    return float(completion == answer)


class Scorer:
    def __call__(self, completion: str, answer: str) -> float:
        return 1.0


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the configs of runs, which do not start."""
    started = list[RunConfig]()

    def run(config: RunConfig, reward_of: object, local: object) -> Any:
        started.append(config)
        return SimpleNamespace(signal=None, directory=Path("x"), experiment=None, state=None)

    monkeypatch.setattr(launch.trainer, "run", run)
    return started


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"rollout.group-size": 4}, "rollout.group_size", 4),
        ({"rollout.draft_length": 2}, "rollout.draft_lengths", ()),
        ({"rollout.draft-length": 2, "rollout.draft-lengths": [0, 2]}, "rollout.draft_lengths", (0, 2)),
        ({"draft.kind": "none"}, "rollout.draft_lengths", ()),
        ({"data.prompts": 2}, "microbatches", 16),
        ({"data.prompts": 2, "microbatches": 64}, "microbatches", 64),
        ({"rollout.phases": [[4, 2048], [1, 4096]]}, "rollout.phases", ((4, 2048), (1, 4096))),
        ({"data.chat_template_kwargs": {"x": [1]}}, "data.chat_template_kwargs", {"x": [1]}),
    ],
)
def test_options_are_those_of_the_command_line(
    configs: list[RunConfig], options: dict[str, Any], field: str, value: object
) -> None:
    train("m", "d.jsonl", score, options=options)
    (config,) = configs
    assert functools.reduce(getattr, field.split("."), config) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zzz": 1}, "options: zzz = 1: unknown option; ...--help all"),
        ({"rollout.groupsize": 4}, "options: rollout.groupsize = 4: unknown option; did you mean rollout.group_size?"),
        ({"nope.group_size": 1}, "options: nope.group_size = 1: ...mean rollout.group_size?"),
        ({"batch_size": 8}, "options: batch_size = 8: ...mean data.prompts, warmup.batch_size or distill.batch_size?"),
        ({"frozen": True}, "options: frozen = True: ...mean draft_training.mode"),
        ({"data.function": "a:b"}, "options: data.function = a:b: unknown option; can be set only in a recipe file"),
        ({"algorithm": "dapo"}, "options: algorithm = dapo: unknown option; is only on the command line"),
        ({"rollout": {"group_size": 1}}, "options: rollout = {'group_size': 1}: unknown option; "),
        ({"rollout.group_size": "x"}, "rollout.group_size = x: "),
        ({"rollout.group_size": 1}, "rollout.group_size = 1: ...at least 2...advantage.baseline = group"),
        ({"reward.also": ["format"], "reward.weights": [1, 2]}, "options: reward.also, reward.weights: ...function"),
    ],
)
def test_invalid_options_are_one_line(configs: list[RunConfig], options: dict[str, Any], message: str) -> None:
    with refuses(message, ConfigError):
        train("m", "d.jsonl", score, options=options)
    assert not configs


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (score, "python:score"),
        (functools.partial(score), "python:partial"),
        (Scorer(), "python:Scorer"),
        ("math", "math"),
    ],
)
def test_a_reward_may_be_any_callable(configs: list[RunConfig], reward: Any, name: str) -> None:
    train("m", "d.jsonl", reward)
    assert configs[0].reward.scorer == name


def three(completion: str, answer: str, extra: str) -> float:
    return 0.0


def trl(completions: list[str], **columns: object) -> list[float]:
    return [0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (three, "reward = three: takes (completion: str, answer: str, extra: str)...; must take (completion, problem)"),
        (trl, "reward = trl: takes (completions...; must take (completion, problem) or (completion, answer)"),
        ([score], "reward.scorer = [<function score...: must be "),
    ],
)
def test_rewards_that_cannot_be_called_are_refused_first(configs: list[RunConfig], reward: Any, message: str) -> None:
    with refuses(message, ConfigError):
        train("m", "d.jsonl", reward)
    assert not configs


ROW = {"prompt": "1 + 1", "answer": "2"}
IN_PYTHON = 'options={"data.prompt_field": "messages"} in Python'


@pytest.mark.parametrize("out", [None, "there/run"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data = []: must hold at least one problem"),
        (None, "data = None: must be a path, a name on the hub, or a list of dicts"),
        ({"prompt": ["1 + 1"]}, "data = {'prompt': ['1 + 1']}: must be a path"),
        ([ROW, "1 + 1"], "data[1] = 1 + 1: must be a dict"),
        ([ROW, ROW | {"x": {1}}], "data[1]: ...set...; must hold text, numbers"),
        ([ROW, ROW | {"answer": ""}], "data[1]: field 'answer' must be text or a number"),
        ([ROW, ROW | {"x": "\ud800"}], "data[1]: ...surrogates not allowed; must hold text, numbers"),
        ([ROW, ROW | {"x": ["\udfff"]}], "data[1]: ...surrogates not allowed"),
        ([ROW], "data.held_out_count = "),
        (
            [{"messages": [{"role": "user", "content": "x"}], "answer": 1}],
            f"data.prompt_field = prompt: data[0] has no such field; ...--data.prompt-field messages...{IN_PYTHON}",
        ),
        ([{"prompt": "x", "solution": 1}], 'data.answer_field = answer: data[0] ...{"data.answer_field": "solution"}'),
    ],
)
def test_a_refused_list_names_its_row_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Any, message: str, out: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.trainer, "run", lambda config, *_: build_problems(config))
    with refuses(message, ConfigError):
        train("m", data, score, out=out)
    assert not [*tmp_path.iterdir()]


def test_row_85_a_list_stays_only_if_a_run_recorded_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(config: RunConfig, *_: object) -> Any:
        if Path("runs/own_data").is_dir():
            Path("runs/own_data/config.json").write_text(json.dumps({"data": {"train": config.data.train}}))
        raise KeyError("x")

    monkeypatch.setattr(launch.trainer, "run", fail)
    with pytest.raises(KeyError):
        train("m", [ROW], score)
    assert not [*tmp_path.iterdir()]
    Path("runs/own_data").mkdir(parents=True)
    with pytest.raises(KeyError):
        train("m", [ROW], score)
    assert [*Path("runs").glob("data-*.jsonl")]


def test_row_93_a_list_that_never_ends_is_refused(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(problem_list, "MOST_PROBLEMS", 1000)
    with refuses("data = repeat: must hold at most 1,000 problems and ...a file", ConfigError):
        train("m", itertools.repeat(ROW), score)
    train("m", itertools.repeat(ROW, 1000), score)
    monkeypatch.setattr(problem_list, "MOST_LETTERS", 1000)
    with refuses("data = repeat: ...and 1,000 letters; ...a file", ConfigError):
        train("m", itertools.repeat(ROW), score)


def test_row_93_numbers_of_numpy_are_numbers(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": np.str_("x"), "answer": np.int64(3), "columns": [np.bool_(True), np.float32(0.5), np.arange(2)]}
    row |= {"single": np.float32(1234.56), "half": np.array([[0.1]], np.float16), "double": np.array(0.1)}
    train("m", [row], score, steps=np.int32(7), options={"lora.rank": np.int64(4), "lora.merged": np.bool_(True)})
    (config,) = configs
    written = json.loads(Path(str(config.data.train)).read_text())
    exact = {"single": 1234.56, "half": [[0.1]], "double": 0.1}
    assert written == {"prompt": "x", "answer": 3, "columns": [True, 0.5, [0, 1]], **exact}
    assert json.dumps([config.steps, config.lora.rank, config.lora.merged]) == "[7, 4, true]"


def test_a_list_has_the_same_file_when_the_run_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, configs: list[RunConfig]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = [{}, {"out": "runs/own_data", "resume": True}, {"out": "b"}]
    for call in [*calls, {"out": "b", "resume": True}]:
        train("m", [ROW], score, **call)
    chose, by_name, named, again = (Path(str(config.data.train)) for config in configs)
    assert chose == by_name and chose.parent == Path("runs") and named == again == Path("b", chose.name)
    assert json.loads(chose.read_text()) == json.loads(named.read_text()) == ROW


def test_a_run_without_a_draft_is_not_compared() -> None:
    config = override(tiny, {"rollout.draft_length": 0, "rollout.draft_lengths": ()})
    nothing: Any = None
    experiment = Experiment(config, nothing, nothing, nothing, nothing, nothing)
    with refuses("speedup.steps = 5: ...without a draft", ConfigError):
        TrainedRun(Path("x"), experiment, nothing, None).compare()


@pytest.mark.parametrize("prompt", [None, {"content": "x"}, object(), [], ""])
def test_what_is_no_prompt_is_refused_before_anything_is_sampled(prompt: object) -> None:
    nothing: Any = None
    run: Any = TrainedRun(Path("x"), nothing, nothing, None)
    with refuses("generate: field 'prompt' must ", ConfigError):
        run.generate(prompt)
