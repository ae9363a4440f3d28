"""Faults in what a prompt is made of: nulls that Arrow pads, tools, messages as text."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.data.answer_files import answer_records, load_answers
from launch.data.batches import PromptTable
from launch.data.problems import Problem, read_problems
from launch.data.prompts import Conversation, Message, prompt_text, tools_of
from launch.data.responses import Answers
from launch.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from launch.errors import ConfigError
from launch.evaluation.one_prompt import given_problem
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import refuses

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# Shows everything of a prompt, in the alphabet of bytes.
SHOWN = (
    "{% for message in messages %}{{ message.role }}={{ message.content or '' }}"
    "{{ message.tool_calls | tojson if message.tool_calls }};{% endfor %}{{ tools | tojson if tools }}"
)
HI = {"role": "user", "content": "hello"}


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the files of a tokenizer of bytes that shows messages and tools."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": SHOWN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    return tmp_path


def in_every_format(directory: Path, rows: list[dict[str, Any]]) -> dict[str, list[Problem]]:
    """Return the problems of rows with fields q and a, read from each format."""
    (directory / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "a.json").write_text(json.dumps(rows))
    names = [*dict.fromkeys(name for row in rows for name in row)]
    parquet.write_table(pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows]), directory / "a.parquet")
    with (directory / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    files = "a.jsonl", "a.json", "a.parquet", "a.csv"
    return {name: read_problems(directory / name, "q", "a", scorers=("own:scorer",)) for name in files}


def ids(problems: list[Problem], directory: Path) -> list[str]:
    table = PromptTable.build(problems, HuggingFaceTokenizer(directory), 2000, 257)
    tokenizer = HuggingFaceTokenizer(directory)
    return [tokenizer.decode(row) for row in table.rows]


ROWS = {
    "arguments of two tools": [
        {"q": [HI, calling("f", city="Paris"), HI], "a": "1"},
        {"q": [HI, calling("clock", zone="UTC"), HI], "a": "2"},
    ],
    "nested": [
        {"q": [HI, calling("f", at={"x": {"deep": 1}}), HI], "a": "1", "tools": [tool("f", at={"type": "object"})]},
        {"q": [HI, calling("g", by=[{"y": 2}, {"z": [3]}]), HI], "a": "2", "tools": [tool("g", by={"minItems": 1})]},
    ],
    "no arguments, no calls, no tools": [
        {"q": [HI, calling("f"), HI], "a": "1"},
        {"q": [HI], "a": "2", "tools": []},
        {"q": [HI, calling("g", x=[None, 1]), HI], "a": "3", "tools": [tool("g", x={"enum": [None, 1]})]},
    ],
    "written nulls": [
        {"q": [HI, calling("f", city=None, unit="C"), HI], "a": "1", "tools": [tool("f", city={"default": None})]},
        {"q": [HI, {"role": "assistant", "content": "x", "tool_calls": None}, HI], "a": "2", "tools": None},
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_row_65_equal_rows_are_equal_prompts_in_every_format(directory: Path, name: str) -> None:
    read = in_every_format(directory, ROWS[name])
    expected = ids(read["a.jsonl"], directory)
    assert "null}" not in "".join(expected) and "null," not in "".join(expected).replace("[null,", "")
    for format, problems in read.items():
        assert ids(problems, directory) == expected, format
        assert [problem.prompt for problem in problems] == [problem.prompt for problem in read["a.jsonl"]], format
    keys = [[problem.key for problem in read[format]] for format in ("a.jsonl", "a.json", "a.parquet")]
    assert keys[0] == keys[1] == keys[2]


def test_row_65_columns_are_equal_too_and_maps_are_objects(tmp_path: Path) -> None:
    rows = [
        {"q": "x", "a": "1", "extra": {"tests": [{"in": 1}, {"out": None}]}, "by": {"k": 1, "l": 2}},
        {"q": "y", "a": "2", "hint": "z", "by": {}},
    ]
    kinds = {"q": pa.string(), "a": pa.string(), "hint": pa.string(), "by": pa.map_(pa.string(), pa.int64())}
    kinds["extra"] = pa.struct({"tests": pa.list_(pa.struct({"in": pa.int64(), "out": pa.string()}))})
    parquet.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = [
        [problem.columns for problem in read_problems(tmp_path / name, "q", "a", scorers=("own:scorer",))]
        for name in ("a.jsonl", "a.parquet")
    ]
    assert columns[0] == columns[1] == [rows[0] | {"extra": {"tests": [{"in": 1}, {}]}}, rows[1]]


TOOLS = [tool("f", x={"type": "number"})]


@pytest.mark.parametrize("written", [TOOLS, json.dumps(TOOLS), [json.dumps(each) for each in TOOLS]])
def test_row_66_tools_reach_the_template_of_their_row_and_come_back(directory: Path, written: object) -> None:
    rows = [{"q": [HI], "a": "1", "tools": written}, {"q": [HI], "a": "1"}]
    (directory / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = HuggingFaceTokenizer(directory)
    with_tools, without = problems = read_problems(directory / "a.jsonl", "q", "a", distinct=True)
    assert tokenizer.decode(tokenizer.chat(with_tools.prompt)) == f"user=hello;{json.dumps(TOOLS)}"
    assert tokenizer.decode(tokenizer.chat(without.prompt)) == "user=hello;"
    assert with_tools.prompt != without.prompt and with_tools.key != without.key
    assert with_tools.question != without.question and '"name": "f"' in prompt_text(with_tools.prompt)
    # Answers that a draft learns from have the prompts that they answer.
    asked = [tokenizer.chat(problem.prompt) for problem in problems]
    answers = Answers.pad([0, 1], [(prompt, [5, 0]) for prompt in asked], 200)
    lines = map(json.dumps, answer_records(answers, problems, tokenizer))
    (directory / "answers.jsonl").write_text("\n".join(lines))
    again, _ = load_answers(directory / "answers.jsonl", tokenizer, 198, 2, 257)
    assert np.array_equal(again.tokens, answers.tokens[:, : again.tokens.shape[1]])
    said = {"messages": [HI, {"role": "assistant", "content": "x"}], "tools": written}
    (directory / "answers.jsonl").write_text(json.dumps(said))
    again, _ = load_answers(directory / "answers.jsonl", tokenizer, 198, 2, 257)
    assert again.tokens[0, : again.prompt_lengths[0]].tolist() == asked[0]


def test_row_66_the_option_names_the_field(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"q": "hello", "a": "1", "info": {"tools": TOOLS}, "tools": ["hammer"]}
    (directory / "a.jsonl").write_text(json.dumps(row))
    (problem,) = read_problems(directory / "a.jsonl", "q", "a", tools_field="info.tools")
    assert problem.prompt == Conversation([Message("user", "hello")], TOOLS) != (Message("user", "hello"),)
    assert (Message("user", "hello"),) != problem.prompt and tools_of(problem.prompt) == TOOLS
    assert read_problems(directory / "a.jsonl", "q", "a", tools_field=None)[0].prompt == "hello"
    with refuses("/...a.jsonl:1: field 'tools' = ...hammer...data.tools_field = None", ConfigError):
        read_problems(directory / "a.jsonl", "q", "a")
    assert not caplog.records
    read_problems(directory / "a.jsonl", "q", "a", tools_field="functions")
    assert "data.tools_field = functions" in caplog.text


def test_row_66_a_template_that_cannot_take_tools_is_named_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(directory / "tokenizer_config.json", chat_template="no tools {{ messages[0].content }}")
    prompt = Conversation([Message("user", "hello")], TOOLS)
    tokenizer = HuggingFaceTokenizer(directory)
    assert {tokenizer.decode(tokenizer.chat(prompt)) for _ in range(2)} == {"no tools hello"}
    assert len(caplog.records) == 1 and f"model.path = {directory}" in caplog.text
    HuggingFaceTokenizer(directory).chat(prompt)
    for own in (ByteTokenizer(), ByteTokenizer()):
        assert bytes(own.chat(prompt)) == bytes(own.chat(prompt)) == b"hello"
    assert len(caplog.records) == 4


def test_row_66_named_templates_are_chosen_as_transformers_does(directory: Path) -> None:
    templates = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    change(directory / "tokenizer_config.json", chat_template=named)
    tokenizer, asked = HuggingFaceTokenizer(directory), [Message("user", "hello")]
    shown = [tokenizer.decode(tokenizer.chat(prompt)) for prompt in (tuple(asked), Conversation(asked, TOOLS))]
    assert shown == ["plain", "with f"]


SYSTEM = {"role": "system", "content": "it"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_row_104_the_json_of_messages_is_messages(tmp_path: Path, name: str) -> None:
    texts = [json.dumps([SYSTEM, HI]), f" {json.dumps([HI], indent=1)}\n", '[{"a": 1}]', "[1] and [{'role'}]"]
    read = in_every_format(tmp_path, [{"q": text, "a": "1"} for text in texts])[name]
    assert [problem.prompt for problem in read[:2]] == [
        (Message("system", "it"), Message("user", "hello")),
        (Message("user", "hello"),),
    ]
    assert [problem.prompt for problem in read[2:]] == texts[2:]
    (tmp_path / "b.csv").write_text(f'q,a\n"{[SYSTEM, HI]}",1\n')
    with refuses("/...b.csv:2: field 'q' = [{'role'...must be JSON, with its quotes", ConfigError):
        read_problems(tmp_path / "b.csv", "q", "a")
    edges = '[{"from": "a", "to": "b"}]'
    assert given_problem(edges).prompt == edges
    for text, said in (
        ('[{"from": "human", "value": "hi"}]', "no field 'role'"),
        ("[{'from': 'human', 'value': 'hi'}]", "must be JSON"),
        ('{"role": "user", "content": "hi"}', "must be text or a list of messages"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "must be text or a list of messages"),
        ('{"conversations": [{"from": "human", "value": "hi"}]}', "must be text or a list of messages"),
        ('[{"role": "user", "content": "a", "content": "b"}]', "'content' stands twice"),
    ):
        with refuses(f"--prompt: ...{said}", ConfigError):
            given_problem(text)
    assert given_problem(texts[0]).prompt == read[0].prompt and given_problem("hello").prompt == "hello"
    write_word_tokenizer(tmp_path)
    assert WORDS[HuggingFaceTokenizer(tmp_path).chat(read[1].prompt)[1]] == "hello"
