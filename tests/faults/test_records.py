"""Faults in files of problems: paths that look like patterns, missing shards, formats."""

import csv
import gzip
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import launch.data.data_files
from configs.schema import DataConfig, RunConfig
from launch.data.problems import read_problems
from launch.data.records import read_records
from launch.errors import ConfigError
from launch.run.pin_references import with_commits
from launch.setup.problems import build_problems
from tests.refusals import refuses

pytest.importorskip("pyarrow")


def write(path: Path, answers: Sequence[Any], kind: Any = None) -> str:
    """Write problems with these answers, in the format of the path's name. kind: type of the answers in parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"question {answer}", "answer": answer} for answer in answers]
    name = path.name.lower()
    if name.endswith(".parquet"):
        from pyarrow import array, parquet, table

        questions = [row["question"] for row in rows]
        with path.open("wb") as file:
            parquet.write_table(table({"question": questions, "answer": array(answers, kind)}), file)
    elif ".csv" in name:
        with (gzip.open if name.endswith(".gz") else open)(path, "wt", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = json.dumps(rows) if ".json" in name and ".jsonl" not in name else "\n".join(map(json.dumps, rows))
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


def answers(paths: str | tuple[str, ...], option: str = "data.train") -> list[str]:
    return [problem.answer for problem in read_problems(paths, "question", "answer", option=option)]


ODD = ["run[1]/a.parquet", "s*/a?.parquet", "a::b/x.parquet", "{x,y}/a.parquet", "%41/#a.parquet", "**/a.parquet"]
ODD += ["s3:/b/a.parquet", "a b/c.jsonl", "[ab].csv", "file:/a.parquet", "hf:/datasets/o/n.parquet", "~/a.parquet"]


@pytest.mark.parametrize("name", ODD)
def test_row_34_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neighbours have names that the path would match as a pattern."""
    monkeypatch.chdir(tmp_path)
    ending = Path(name).suffix
    for neighbour in (
        f"run1/a{ending}",
        f"s1/a{ending}",
        f"s2/a1{ending}",
        f"x/a{ending}",
        f"A/#a{ending}",
        f"a{ending}",
    ):
        write(Path(neighbour), ["wrong"])
    with refuses(f"data.train = {name}: cannot be read", ConfigError):
        answers(name)
    assert answers(write(Path(name), ["7"])) == answers(str(tmp_path / name)) == ["7"]


@pytest.mark.parametrize(
    "name", ["A.PARQUET", "a.Jsonl", "a.CSV", "a.JSON", "a.jsonl.gz", "a.json.GZ", "a.csv.gz", "a"]
)
def test_row_34_endings_in_any_case_and_gzip_are_read(tmp_path: Path, name: str) -> None:
    assert answers(write(tmp_path / name, ["1", "2"])) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.parquet", b"", ": cannot be read: ...0 bytes"),
        ("a.parquet", [], ": must hold at least one problem"),
        ("a.jsonl", b"", ": must hold at least one problem"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), ": must hold at least one problem"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], ": cannot be read: "),
        ("a.jsonl.gz", b"\x1f\x8bno", ": cannot be read: "),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", ": must be UTF-8 text, plain or compressed by gzip"),
        ("a\0.jsonl", None, ": cannot be read: "),
        ("a" * 999, None, ": cannot be read: "),
    ],
)
def test_row_34_empty_and_damaged_files_are_named(tmp_path: Path, name: str, contents: Any, said: str) -> None:
    if isinstance(contents, list):
        write(tmp_path / name, contents)
    elif contents is not None:
        (tmp_path / name).write_bytes(contents)
    with refuses(f"{tmp_path / name}{said}", ConfigError):
        answers(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"question": "x", "answer": 1, "answer": 2}', ":1: ...'answer'"),
        ("a.json", '[{"question": "x", "answer": {"b": 1, "b": 2}}]', ": ...'b'"),
        ("a.csv", "question,answer,answer\nx,1,2\n", ":1: ...'answer'"),
        ("a.parquet", ["question", "answer", "answer"], ": ...'answer'"),
    ],
)
def test_row_34_names_that_stand_twice_are_refused(tmp_path: Path, name: str, text: Any, said: str) -> None:
    if isinstance(text, list):
        from pyarrow import Table, array, parquet

        parquet.write_table(Table.from_arrays([array(["1"])] * 3, text), str(tmp_path / name))
    else:
        (tmp_path / name).write_text(text)
    with refuses(f"{tmp_path / name}{said}", ConfigError):
        answers(str(tmp_path / name))


def test_row_34_fields_of_csv_may_be_long_and_columns_unnamed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"question,answer,,\n{'x' * 200_000},1,,\n")
    assert answers(str(tmp_path / "a.csv")) == ["1"]


def test_row_34_several_files_and_folders_are_given_on_purpose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tuple(write(tmp_path / name, [name]) for name in ("[b].jsonl", "a.parquet", "c.csv.gz"))
    assert answers(files) == ["[b].jsonl", "a.parquet", "c.csv.gz"]
    folder = tmp_path / "all[1].parquet"
    for number in range(3):
        write(folder / f"part/{number}.parquet", [str(number)])
    for other in ("README.md", "README.txt", "_SUCCESS", ".part/3.parquet", "part/.0.parquet", ".a.txt"):
        write(folder / other, ["no"])
    assert answers((str(folder), files[0])) == ["0", "1", "2", "[b].jsonl"]
    assert capsys.readouterr().out == f"data.train = {folder}: 3 files\n"
    write(tmp_path / "elsewhere/deep/3.parquet", ["3"])
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(folder)
    assert answers(str(folder)) == ["3", "0", "1", "2"]
    (folder / "more").unlink()
    (folder / "z.parquet").symlink_to(tmp_path / "gone.parquet")
    with refuses(f"{folder}/z.parquet: cannot be read", ConfigError):
        answers(str(folder))
    (folder / "z.parquet").unlink()
    config = RunConfig(name="x", steps=1, data=DataConfig(train=(str(folder), files[0]), held_out_count=1))
    assert [problem.answer for problem in build_problems(with_commits(config)).train] == ["0", "1", "2"]
    for empty in ("", (), ("a", "")):
        with refuses("train = "):
            DataConfig(train=empty)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "no data file"),
        (("train.jsonl", "test.jsonl"), "test.jsonl and train.jsonl"),
        (("data/a.jsonl", "data/validation-1.jsonl"), "data/a.jsonl and data/validation-1.jsonl"),
        (("a.jsonl", "a.parquet"), "a.jsonl and a.parquet"),
        (("a.jsonl", "a.jsonl.gz"), "a.jsonl and a.jsonl.gz"),
        (("a.jsonl", "b.JSONL.zst"), "b.JSONL.zst cannot be read"),
        (("a.parquet", "b/c.parquet.gz"), "b/c.parquet.gz cannot be read"),
        (("a.arrow",), "a.arrow cannot be read"),
        (("a.csv", "a.tsv", "LICENSE.txt", "README.md"), "a.tsv cannot be read"),
        (("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"), "2 of the 3 files train-*-of-00003"),
        (("1_of_2.jsonl", "b.jsonl"), "1 of the 2 files *-of-2"),
    ],
)
def test_row_34_a_folder_is_one_split(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        write(folder / name, ["1"])
    with refuses(f"data.held_out = {folder}: ...{said}...", ConfigError):
        answers(str(folder), "data.held_out")


@pytest.mark.parametrize(
    ("readme", "missing"),
    [
        ("{split: train, path: data/train-*}", "data/train-00001-of-00003-c0ffee1.parquet"),
        (None, "data/train-00000-of-00003-c0ffee0.parquet"),
        ("{split: train, path: [data/more.jsonl, 'data/train-*']}", "data/more.jsonl"),
    ],
)
def test_row_36_a_missing_shard_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readme: str | None, missing: str
) -> None:
    """Read a cache offline. Older data sets have names that end in a hash."""
    data = tmp_path / "c0ffee"
    monkeypatch.setattr(launch.data.data_files, "fetch", lambda option, name, *patterns: data)
    for number in range(3):
        write(data / f"data/train-0000{number}-of-00003-c0ffee{number}.parquet", [str(number)])
    write(data / "data/test-00000-of-00001.parquet", ["4"])
    if readme is not None:
        write(data / "data/more.jsonl", ["3"])
        (data / "README.md").write_text(f"---\nconfigs: [{{config_name: a, data_files: [{readme}]}}]\n---\n")
    assert answers("org/shards:train")[-3:] == ["0", "1", "2"]
    (data / missing).unlink()
    said = "2 of the 3 files data/train-*-of-00003" if "train" in missing else f"lists {missing}"
    with refuses(f"data.train = org/shards@c0ffee:...{said}...`hf download org/shards", ConfigError):
        answers("org/shards:train")


def test_row_37_answers_are_as_short_as_their_type_allows(tmp_path: Path) -> None:
    import pyarrow as pa

    given = [1234.56, 0.1, 1e-5, 4096.0, 1e20, -2.5]
    shortest = ["1234.56", "0.1", "0.00001", "4096", "1" + "0" * 20, "-2.5"]
    single = pa.float32()
    assert answers(write(tmp_path / "a.parquet", given, single)) == shortest
    assert answers(write(tmp_path / "b.parquet", given, pa.float64())) == shortest
    assert answers(write(tmp_path / "c.parquet", [0.1, 2.5], pa.float16())) == ["0.1", "2.5"]
    (tmp_path / "h.jsonl").write_text(
        "".join(f'{{"question": "x", "answer": {x}}}\n' for x in ("2", "1.5", "-0.0", "1e3"))
    )
    assert answers(tmp_path / "h.jsonl") == answers(write(tmp_path / "h.parquet", [2, 1.5, 0, 1e3], pa.float64()))
    assert answers(tmp_path / "h.jsonl") == ["2", "1.5", "0", "1000"]
    nested = [{"b": {"c": value}, "d": [value]} for value in given]
    kind = pa.struct({"b": pa.struct({"c": single}), "d": pa.list_(single)})
    path = write(tmp_path / "d.parquet", nested, kind)
    assert [problem.answer for problem in read_problems(path, "question", "answer.b.c")] == shortest
    keyed = write(tmp_path / "g.parquet", [[("b", 0.1)]], pa.map_(pa.string(), single))
    read = read_problems(keyed, "question", "question", scorers=("own:scorer",))
    assert read[0].columns["answer"] == {"b": Decimal("0.1")}
    words = pa.array(given, single).dictionary_encode()
    assert answers(write(tmp_path / "e.parquet", words, words.type)) == shortest
    with refuses("/f.parquet: row 1: field 'answer'...finite", ConfigError):
        answers(write(tmp_path / "f.parquet", [float("nan")], single))


@pytest.mark.timeout(60)
def test_row_84_each_folder_is_entered_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for level in range(22):
        folder.mkdir()
        (folder / "a link").symlink_to(folder / "sub")
        write(folder / f"{level:02}.jsonl", [str(level)])
        folder = folder / "sub"
    outside = tmp_path / "outside"
    write(outside / "z.jsonl", ["outside"])
    for name in ("0", "1"):
        (tmp_path / "data" / name).symlink_to(outside)
    (tmp_path / "data" / "up").symlink_to(tmp_path / "data")
    files = launch.data.data_files.data_files("data.train", tmp_path / "data", "train")
    names = [Path(file).relative_to(tmp_path / "data").as_posix() for file in files]
    assert names == sorted([*("sub/" * level + f"{level:02}.jsonl" for level in range(22)), "0/z.jsonl"])


def of_zeros(path: Path, rows: int, zeros: Any) -> str:
    """Write a parquet file of little more than a kB with a column of zeros."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"question": [f"question {row}" for row in range(rows)], "answer": ["7"] * rows, "zeros": zeros}
    parquet.write_table(pa.table(columns), str(path), compression="zstd")
    assert path.stat().st_size < 20_000
    return str(path)


def test_row_84_only_the_columns_that_are_read_are_read(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow as pa

    path = of_zeros(tmp_path / "a.parquet", 1, pa.array([{"x": [0] * 9, "y": 1}]))
    rows = [{"question": "question 0", "answer": "7", "zeros": {"x": [0] * 9, "y": 1}}]
    for fields, also, expected in (
        (["question"], [], [{"question": "question 0"}]),
        (["answer"], ["none", "zeros.y"], [{"answer": "7", "zeros": {"y": 1}}]),
        (["answer", "none"], [], rows),
        (None, ["answer"], rows),
    ):
        assert [record for record, _ in read_records("data.train", path, "train", fields, also)] == expected
    with refuses(f"data.answer_field = b: {path}: row 1 has no such field; it has 'question', 'answer', 'zeros'"):
        read_problems(path, "question", "b")
    offsets, zeros = pa.array([0, 40_000_000], pa.int32()), pa.array(np.zeros(40_000_000, np.int8))
    bomb = of_zeros(tmp_path / "b.parquet", 1, pa.ListArray.from_arrays(offsets, zeros))
    assert answers(bomb) == ["7"]
    for scorers, field in ((("own:scorer",), "answer"), ((), "b")):
        with refuses(f"data.train = {bomb}: cannot be read: holds over ...when decompressed", ConfigError):
            read_problems(bomb, "question", field, scorers=scorers)


def test_row_84_text_that_is_decompressed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.data.json_lines._LEAST_BYTES", 10_000)
    for name in ("a.jsonl.gz", "a.csv.gz", "a.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b" " * 100_000))
        with refuses(f"data.train = {tmp_path / name}: cannot be read: holds over ...when decompressed", ConfigError):
            answers(str(tmp_path / name))
    assert answers(write(tmp_path / "b.jsonl.gz", ["1", "2"])) == ["1", "2"]
