"""Names on the hub: checkpoints and data sets are fetched once from a local server, at the commit of the run."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import launch.train
from configs.override import override
from configs.schema import DataConfig, ModelConfig, RunConfig
from launch.data.hub import checkpoint_directory, fetch, hub_name
from launch.data.problems import read_problems
from launch.errors import ConfigError
from launch.run.pin_references import with_commits
from tests.launch.checkpoints import write_checkpoint, write_problems
from tests.launch.local_hub import LocalHub
from tests.launch.programs import SHRUNK, argv, metrics
from tests.refusals import assert_refused, refuses

MODEL, DATA = "HuggingFaceTB/SmolLM2-135M-Instruct", "openai/gsm8k"
NAMES = ("model", MODEL), ("dataset", DATA)
FIELDS = "question", "answer", None, "####"
README = """---
configs:
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
Sums.
"""


def write_gsm8k(directory: Path, train: int = 8) -> Path:
    """Write a data set with one parquet file for each of three splits in two subsets."""
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    directory.mkdir()
    (directory / "README.md").write_text(README)
    (directory / "gsm8k.py").write_text("raise SystemExit('code of a data set was run')")
    for name, answers in {"main/train": range(train), "main/test": range(3), "socratic/train": [7]}.items():
        write_problems(directory / "problems.jsonl", [str(answer) for answer in answers])
        rows = [json.loads(line) for line in (directory / "problems.jsonl").read_text().splitlines()]
        path = directory / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(Table.from_pylist(rows), path)
    (directory / "problems.jsonl").unlink()
    return directory


def write_model(directory: Path) -> Path:
    """Write a checkpoint, and files that must not be fetched: code, pickles, other copies of the weights."""
    write_checkpoint(directory)
    (directory / "onnx").mkdir()
    others = ("pytorch_model.bin", "training_args.pt", "onnx/model.safetensors", "consolidated.safetensors")
    for name in ("modeling.py", *others):
        (directory / name).write_bytes(b"no")
    return directory


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", "org/name"),
        ("org/na.me-1@v1", "org/na.me-1@v1"),
        ("org/name@refs/pr/1:split", "org/name@refs/pr/1:split"),
        ("org/name@0a1b:sub/split", "org/name@0a1b:sub/split"),
        *((path, None) for path in ("name", "org/name/", "/org/name", "./org/name", "../name", "a/b@")),
        *((path, None) for path in ("a/b/c.jsonl", "train/data.jsonl", "a/b:c/d/e")),
    ],
)
def test_names_and_paths(path: str, expected: str | None):
    name = hub_name(path, "dataset")
    assert (None if name is None else str(name)) == expected


def test_a_local_path_takes_precedence(hub: LocalHub):
    Path("org/name").mkdir(parents=True)
    assert checkpoint_directory("model.path", "org/name") == Path("org/name")


def test_of_a_checkpoint_only_tensors_and_the_tokenizer_are_fetched_once(hub: LocalHub, tmp_path: Path):
    commit = hub.push("model", MODEL, write_model(tmp_path / "policy"))
    directory = checkpoint_directory("model.path", MODEL)
    assert directory.name == commit
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in directory.iterdir()} == names
    before = len(hub.requested)
    fetch.cache_clear()
    assert checkpoint_directory("model.path", MODEL) == directory and len(hub.requested) == before


def test_a_missing_repository_is_one_line(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.push("model", MODEL, write_model(tmp_path / "policy"))
    for path, said in (("no/where", "no such file or directory"), (f"{MODEL}@v9", "no revision v9")):
        with refuses(f"model.path = {path}: ...{said}", ConfigError):
            checkpoint_directory("model.path", path)
    hub.stop()
    with refuses(f"model.path = {MODEL}: ...`hf download {MODEL}`", ConfigError):
        checkpoint_directory("model.path", MODEL)
    with refuses(f"data.train = {DATA}:...`hf download {DATA} --repo-type dataset`", ConfigError):
        read_problems(DATA, *FIELDS)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses(f"model.path = {MODEL}: ...pip install -e '.[hf]' in a clone", ConfigError):
        checkpoint_directory("model.path", MODEL)


def answers(path: str, option: str = "data.train") -> list[str]:
    return [problem.answer for problem in read_problems(path, *FIELDS, option=option)]


def test_of_a_data_set_one_split_is_fetched(hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    commit = hub.push("dataset", DATA, write_gsm8k(tmp_path / "gsm8k"))
    assert answers(DATA) == [str(i) for i in range(8)]
    assert capsys.readouterr().out == f"data.train = {DATA}@{commit}:main/train\n"
    assert set(hub.requested) == {"README.md", "main/train-00000-of-00001.parquet"}
    assert answers(DATA, "data.held_out") == answers(f"{DATA}:test") == answers(f"{DATA}@main:main/test") == list("012")
    assert answers(f"{DATA}:socratic/train") == ["7"]
    for split, said in (("valid", "main...valid...train, test"), ("other/train", "other...socratic, main")):
        with refuses(f"data.train = {DATA}@{commit}:{split}: ...{said}", ConfigError):
            answers(f"{DATA}:{split}")
    hub.stop()
    fetch.cache_clear()
    assert answers(f"{DATA}:test") == list("012")


@pytest.mark.parametrize(
    ("configs", "train", "option", "said"),
    [
        # Without a README, names of files tell the split.
        (None, list("12"), "data.train:valid", "no split valid...test.jsonl, train.jsonl"),
        ("[{config_name: default, data_files: train.jsonl}]", list("12"), "files", "default has no split test...train"),
        ("[{config_name: a}]", list("12"), "files", None),
        (
            "[{config_name: a, data_files: [{split: train, path: no.jsonl}]}]",
            None,
            "data.train",
            "README.md...no.jsonl",
        ),
        ("[{config_name: a, data_files: [{split: train}]}]", None, "data.train", "README.md: "),
        ("{a", None, "data.train", "README.md: "),
    ],
)
def test_the_readme_determines_the_files_to_read(
    hub: LocalHub, tmp_path: Path, configs: str | None, train: list[str] | None, option: str, said: str | None
):
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    if configs is not None:
        (tmp_path / "data/README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    write_problems(tmp_path / "data/train.jsonl", list("12"))
    write_problems(tmp_path / "data/test.jsonl", list("3"))
    hub.push("dataset", "org/stated", tmp_path / "data")
    option, colon, split = option.partition(":")
    if train is not None:
        assert answers("org/stated") == train
    if said is None or split:
        assert answers("org/stated", "files") == ["3"]
    if said is not None:
        with refuses(f"{option} = org/stated@...{said}", ConfigError):
            answers(f"org/stated{colon}{split}", option)


@pytest.mark.parametrize(
    ("names", "asked", "read", "said"),
    [
        (("train.jsonl", "train-2.arrow", "test.arrow"), "", ["train.jsonl"], "left out, ...: train-2.arrow"),
        (("a.jsonl", "b/c.ndjson.zst", "train.zip"), "", ["a.jsonl"], "left out, ...: b/c.ndjson.zst, train.zip"),
        (("a.jsonl", "LICENSE.txt", ".b.arrow", "c.py", "test.arrow"), "", ["a.jsonl"], None),
        (("train.jsonl", "test.arrow"), ":test", [], "has no split test in ...train.jsonl, test.arrow"),
        (("a.arrow", "b.zip"), "", [], "has no split train in ...a.arrow, b.zip"),
        (("a.py",), "", [], "has no split train in ...no data files"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    hub: LocalHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
    asked: str,
    read: list[str],
    said: str | None,
):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write_problems(tmp_path / "data" / name, [name])
    hub.push("dataset", "org/mixed", tmp_path / "data")
    if not read:
        with refuses(f"data.train = org/mixed@...{said}", ConfigError):
            answers(f"org/mixed{asked}")
        return
    assert answers(f"org/mixed{asked}") == read
    *first, last = capsys.readouterr().out.splitlines()
    assert last.startswith("data.train = org/mixed@") and len(first) == (said is not None)
    if said is not None:
        assert_refused(first[0], f"data.train = org/mixed@...{said}")
    assert set(hub.requested) == set(read)
    hub.stop()
    fetch.cache_clear()
    assert answers(f"org/mixed{asked}") == read
    assert capsys.readouterr().out.splitlines() == [*first, last]


def test_a_run_keeps_its_commits(hub: LocalHub, tmp_path: Path):
    """It keeps them even if the hub has newer ones, which programs without the run then read."""
    empty = tmp_path / "work"
    old = [hub.push(kind, name, empty) for kind, name in NAMES]
    config = RunConfig(name="x", steps=1, model=ModelConfig(path=MODEL), data=DataConfig(train=DATA, held_out="here"))
    recorded = with_commits(config)
    assert recorded.model.path == f"{MODEL}@{old[0]}" and recorded.data.train == f"{DATA}@{old[1]}"
    assert recorded.data.held_out == "here" and recorded.draft.path is None
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": recorded.model.path}}))
    new = [hub.push(kind, name, empty) for kind, name in NAMES]
    again = with_commits(config, tmp_path)
    assert (again.model.path, again.data.train) == (f"{MODEL}@{old[0]}", f"{DATA}@{new[1]}")
    assert with_commits(config).model.path == f"{MODEL}@{new[0]}"
    asked = override(config, {"model.path": f"{MODEL}@main"})
    assert with_commits(asked, tmp_path).model.path == f"{MODEL}@{new[0]}"
    hub.stop()
    assert with_commits(config, tmp_path) == again
    assert with_commits(replace(config, model=ModelConfig(path="no/where"))).model.path == "no/where"


@pytest.mark.slow
def test_training_by_name_works_with_an_empty_cache(hub: LocalHub, tmp_path: Path):
    """When the run is resumed, the hub's newest weights have another shape. The run reads those it started from."""
    pytest.importorskip("math_verify")
    commit = hub.push("model", MODEL, write_model(tmp_path / "policy"))
    data = hub.push("dataset", DATA, write_gsm8k(tmp_path / "gsm8k"))
    options = SHRUNK | {"--model.path": MODEL, "--data.train": DATA, "--out": "run", "--steps": "1"}
    assert launch.train.main(argv("gsm8k", options)) == 0
    config = json.loads(Path("run/config.json").read_text())
    assert config["model"]["path"] == f"{MODEL}@{commit}"
    assert (config["data"]["train"], config["data"]["held_out"]) == (f"{DATA}@{data}", f"{DATA}@{data}:main/test")
    write_checkpoint(tmp_path / "other", num_layers=3)
    hub.push("model", MODEL, tmp_path / "other")
    fetch.cache_clear()
    assert launch.train.main(argv("gsm8k", options | {"--steps": "2"}) + ["--resume"]) == 0
    assert [line["step"] for line in metrics(Path("run"))] == [1, 2]
