"""Problems from files, from a function, and the built-in sums."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from configs.schema import DataConfig, ModelConfig, RunConfig
from launch.data.arithmetic import arithmetic
from launch.data.problems import Problem, read_problems, split
from launch.data.prompts import Message
from launch.errors import ConfigError
from launch.rewards.scorers import load_scorer
from launch.setup.problems import Problems, build_problems, check_sources
from tests.refusals import refuses

DATA = Path(os.environ.get("SPECJAX_DATA") or "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no data directory; SPECJAX_DATA names one")


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    return path


def test_fields_become_text(tmp_path: Path):
    """Only newlines end a line, and the answer follows the last marker."""
    lines = '{"q": "é\u2028?", "a": " 7 ", "s": "3+4"}', "", '{"q": "x", "a": 0, "s": 1.5}', ""
    path = write(tmp_path / "a.jsonl", *lines)
    assert read_problems(path, "q", "a") == [Problem(prompt="é\u2028?", answer="7"), Problem(prompt="x", answer="0")]
    assert [problem.solution for problem in read_problems(path, "q", "a", "s")] == ["3+4", "1.5"]
    path = write(tmp_path / "b.jsonl", '{"q": "x", "a": "#### 3 is wrong\\n#### 72"}')
    assert read_problems(path, "q", "a", answer_after="####")[0].answer == "72"


def test_the_same_problems_from_every_format(tmp_path: Path):
    """Text files have a byte order mark. The parquet file has messages, a nested field and a number."""
    problems = [Problem(prompt='a "b",\nc', answer="1.5"), Problem(prompt="é\u2028?", answer="2")]
    text = "\ufeff" + json.dumps([{"q": problem.prompt, "a": problem.answer} for problem in problems], indent=1)
    write(tmp_path / "a.json", text)
    write(tmp_path / "a.csv", '\ufeffq,a\r\n"a ""b"",\nc",1.5\r\né\u2028?,2\r\n')
    for name in ("a.json", "a.csv"):
        assert read_problems(tmp_path / name, "q", "a") == problems, name
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é"}]
    rows = [{"q": chat, "a": {"b": 1e-5}}, {"q": chat[1:], "a": {"b": 2.0}}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read_problems(tmp_path / "a.parquet", "q", "a.b")
    assert [problem.answer for problem in found] == ["0.00001", "2"]
    assert found[0].prompt == tuple(Message(**each) for each in chat)


LINE = '{"q": "x", "a": "# 1"}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "q,a\nx,#1\nx,1,2\n", ":3: "),
        ("a.csv", "q,a\nx\n", ":2: field 'a'"),
        ("a.csv", 'q,a\n"x,1\n', ":2: "),
        ("a.csv", "q,b\nx,1\n", ":2 has no such field...'b'"),
        ("a.json", '[{"q": "x", "a": "#1"}, 2]', ": item 2: "),
        ("a.json", '[{"q": "x", "a": "1"}', ": "),
        ("a.parquet", "PAR1", ": cannot be read: "),
        ("missing.parquet", None, ": cannot be read: "),
        *((name, None, ": ") for name in ("missing.jsonl", "")),
        *(("a.jsonl", text, ": ") for text in (b"\xff\xfe", "\n")),
        ("a.jsonl", f"{LINE}\n{{", ":2:"),
        ("a.jsonl", f"{LINE}\n[1]", ":2:"),
        ("a.jsonl", f'{LINE}\n{{"q": "x", "b": 1}}', ":2 has no such field...'q'...'b'"),
        ("a.jsonl", f'{LINE}\n{{"q": 1}}', ":2 has no such field"),
        ("a.jsonl", f'{LINE}\n{{"q": "x", "a": null}}', ":2:...'a'"),
        ("a.jsonl", f'{LINE}\n{{"q": "x", "a": true}}', ":2:...'a'"),
        ("a.jsonl", f'{LINE}\n{{"q": ["x"], "a": "# 1"}}', ":2:...'q'...\"x\""),
        ("a.jsonl", f'{LINE}\n{{"q": " ", "a": "# 1"}}', ":2:...'q'"),
        ("a.jsonl", f'{LINE}\n{{"q": "x", "a": "1"}}', ":2:...'a'...'#'"),
        ("a.jsonl", f'{LINE}\n{{"q": "x", "a": "1 # "}}', ":2:...'a'...'#'"),
    ],
)
def test_bad_files_and_records_are_named(tmp_path: Path, name: str, text: str | bytes | None, message: str):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
    with refuses(f"{tmp_path / name}{message}", ConfigError):
        read_problems(tmp_path / name, "q", "a", answer_after="#")


@pytest.mark.parametrize("option", ["data.train", "data.held_out", "files"])
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.jsonl",
            '{"q": "x", "a": 1, "s": "y"}\n{"b": 1, "s": {"c": 2}}',
            (
                "data.prompt_field = q: PATH:2 has no such field; it has 'b', 's'",
                "data.answer_field = a: PATH:2 has no such field; it has 'b', 's'",
            ),
        ),
        ("a.jsonl", '{"q": "x", "a": 1}', ("data.solution_field = s: PATH:1 has no such field; it has 'q', 'a'",)),
        ("a.csv", "q,s\nx,y\n", ("data.answer_field = a: PATH:2 has no such field; it has 'q', 's'",)),
        (
            "a.json",
            "[{}]",
            tuple(
                f"data.{field}_field = {field[0]}: PATH: item 1 has no such field; it has none".replace("= p", "= q")
                for field in ("prompt", "answer", "solution")
            ),
        ),
        (
            "a.jsonl",
            '{"q": "x", "a": "", "s": "y"}',
            ("PATH:1: field 'a' must be text or a number, not \"\"; data.answer_field names this field",),
        ),
        (
            "a.jsonl",
            '{"q": [], "a": 1, "s": "y"}',
            (
                "PATH:1: field 'q' must be text or a list of messages with role and content, not []; "
                "data.prompt_field names this field",
            ),
        ),
        (
            "a.jsonl",
            '{"q": "x", "a": 1, "s": null}',
            ("PATH:1: field 's' must be text or a number, not null; data.solution_field names this field",),
        ),
        (
            "a.jsonl",
            '{"messages": [], "reward_model": {"ground_truth": 1}, "s": "y"}',
            (
                "data.prompt_field = q: PATH:1 has no such field; it has 'messages', 'reward_model', 's'; to read "
                "'messages': --data.prompt-field messages on the command line, "
                'options={"data.prompt_field": "messages"} in Python',
                "data.answer_field = a: PATH:1 has no such field; it has 'messages', 'reward_model', 's'; to read "
                "'reward_model.ground_truth': --data.answer-field reward_model.ground_truth on the command line, "
                'options={"data.answer_field": "reward_model.ground_truth"} in Python',
            ),
        ),
        ("a.jsonl", None, ("OPTION = PATH: cannot be read: No such file or directory",)),
        ("a.parquet", None, ("OPTION = PATH: cannot be read: No such file or directory",)),
        ("a.csv", "\0\1".encode("utf-16"), ("OPTION = PATH: must be UTF-8 text, plain or compressed by gzip",)),
    ],
)
def test_refusals_of_files_and_fields_name_the_option(
    tmp_path: Path, option: str, name: str, text: str | bytes | None, said: tuple[str, ...]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    elif name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError) as refused:
        read_problems(path, "q", "a", "s", option=option)
    assert refused.value.args == tuple(line.replace("OPTION", option).replace("PATH", str(path)) for line in said)


def test_split_never_overlaps():
    problems = [Problem(prompt=str(i % 7), answer="") for i in range(10)]
    train, held_out = split(problems, 3)
    assert held_out == problems[7:]
    assert [problem.prompt for problem in train] == ["3", "4", "5", "6"]
    for count, fewest in ((2, 1), (9, 1), (59, 11), (2000, 256)):
        numbered = [Problem(prompt=str(i), answer="") for i in range(count)]
        assert [len(part) for part in split(numbered, None)] == [count - fewest, fewest]
    with refuses("data.held_out_count = 1: ", ConfigError):
        split(problems[:1], None)
    for held in (0, 10, -1):
        with refuses(f"data.held_out_count = {held}: ...1...9", ConfigError):
            split(problems, held)


def test_held_out_problems_that_are_trained_on_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    train = write(tmp_path / "train.jsonl", '{"q": "What is 1 + 1?", "a": 2}', '{"q": "x", "a": 1}')
    new, known = '{"q": "y", "a": 2}', '{"q": [{"role": "user", "content": " what  is １ + 1?\\n"}], "a": 2}'
    held_out = write(tmp_path / "held_out.jsonl", new, known)
    data = DataConfig(train=str(train), held_out=str(held_out), prompt_field="q", answer_field="a")
    config = RunConfig(name="x", steps=1, data=data)
    assert len(build_problems(config).held_out) == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"data.held_out = {held_out}: 1 of 2 ") and f"{held_out}:2" in said
    caplog.clear()
    write(held_out, new)
    build_problems(config)
    assert not caplog.records


PROBLEM, OTHER = Problem(prompt="p", answer="a"), Problem(prompt="o", answer="a")
FUNCTIONS = {
    "pair": (lambda seed: ([PROBLEM] * seed, (OTHER,)), ""),
    "raises": (lambda seed: 1 // 0, "ZeroDivisionError"),
    "nothing": (lambda seed: None, "TypeError"),
    "empty": (lambda seed: ([PROBLEM], []), "empty"),
    "texts": (lambda seed: (["p"], ["p"]), "Problem"),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "missing"])
def test_problems_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module: Any = ModuleType("own_problems")
    monkeypatch.setitem(sys.modules, "own_problems", module)
    function, message = FUNCTIONS.get(name, (None, "AttributeError"))
    if function is not None:
        setattr(module, name, function)
    config = RunConfig(name="own", steps=1, seed=3, data=DataConfig(function=f"own_problems:{name}"))
    with refuses("function = mine: ...package.module:name"):
        DataConfig(function="mine")
    if message:
        with refuses(f"data.function = own_problems:{name}: ...{message}...", ConfigError):
            build_problems(config)
        return
    assert build_problems(config) == Problems([PROBLEM] * 3, [OTHER])
    path = write(tmp_path / "other.jsonl", '{"question": "q", "answer": "b"}')
    data = replace(config.data, held_out=str(path))
    assert build_problems(replace(config, data=data)).held_out == [Problem(prompt="q", answer="b")]
    data = replace(config.data, train=str(path), held_out=str(path))
    assert build_problems(replace(config, data=data)).train == [Problem(prompt="q", answer="b")]


NO_MODEL = "model.path = None: must be a directory with a tokenizer or a name on the hub (ORG/NAME), or set "
NO_MODEL += "data.tokenizer to bytes"
NO_DATA = "data.train = None: must be a file of problems or a name on the hub, or set data.function"


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (None, DataConfig(), (NO_MODEL, NO_DATA)),
        (None, DataConfig(train="a.jsonl"), (NO_MODEL,)),
        (None, DataConfig(tokenizer="bytes"), (NO_DATA,)),
        ("org/name", DataConfig(), (NO_DATA,)),
        ("org/name", DataConfig(function="a:b"), ()),
    ],
)
def test_a_missing_model_and_missing_data_are_said_at_once(
    model: str | None, data: DataConfig, said: tuple[str, ...]
) -> None:
    config = RunConfig(name="x", steps=1, model=ModelConfig(path=model), data=data)
    with pytest.raises(ConfigError) if said else nullcontext() as refused:
        check_sources(config)
    assert not said or refused.value.args == said  # pyright: ignore[reportOptionalMemberAccess]


@needs_data
def test_real_problems():
    problems = read_problems(DATA / "gsm8k" / "test.jsonl", "question", "answer", answer_after="####")
    assert len(problems) == 1319
    assert problems[0].prompt.startswith("Janet") and problems[0].answer == "18"
    assert all(problem.answer.replace(",", "").lstrip("-").replace(".", "").isdigit() for problem in problems)
    problems = read_problems(DATA / "aime24" / "test.jsonl", "problem", "answer")
    assert problems[0].answer == "204"
    assert all(0 <= int(problem.answer) <= 999 for problem in problems)


def test_sums_are_right_distinct_and_by_the_seed():
    exact = load_scorer("exact")
    problems = arithmetic(seed=0, count=200, min_terms=2, max_terms=4, max_value=12)
    for problem in problems:
        terms = [int(term) for term in problem.prompt.removesuffix("=").split("+")]
        assert 2 <= len(terms) <= 4 and all(1 <= term <= 12 for term in terms)
        assert problem.answer == str(sum(terms)) and problem.solution is not None
        *steps, last = problem.solution.split("\n")
        assert last == f"#{sum(terms)}"
        assert steps == [f"{sum(terms[:i])}+{terms[i]}={sum(terms[: i + 1])}" for i in range(1, len(terms))]
        assert exact.score(problem.solution, problem.answer) == 1.0
    assert {problem.prompt.count("+") for problem in problems} == {1, 2, 3}
    assert problems == arithmetic(0, 200, 2, 4, 12) != arithmetic(1, 200, 2, 4, 12)
    every = arithmetic(seed=0, count=9 + 27, min_terms=2, max_terms=3, max_value=3)
    assert len({problem.prompt for problem in every}) == 36
    for bounds, message in ((37, 2, 3, 3), "problems = 37:...36"), ((1, 3, 2, 3), "min_terms = 3:...max_terms...2"):
        with refuses(f"data.arithmetic.{message}", ConfigError):
            arithmetic(0, *bounds)
