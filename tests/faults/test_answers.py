"""Faults in files of answers that a draft learns from."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from launch.data.answer_files import load_answers
from launch.data.problems import read_problems
from launch.data.tokenizers import HuggingFaceTokenizer
from launch.errors import ConfigError
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import refuses


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_word_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def read(path: Path, tokenizer: HuggingFaceTokenizer, most: int = 6) -> tuple[list[str], list[str]]:
    """Return the rows of a file of answers as text, and the lines on what was dropped or cut."""
    answers, notes = load_answers(path, tokenizer, 18, most, tokenizer.vocab_size)
    rows = zip(answers.tokens.tolist(), answers.lengths, strict=True)
    return [" ".join(WORDS[token] for token in row[:length]) for row, length in rows], notes


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


END, ASKED = WORDS[0], "<user> hello <bot>"
TEXT, HI = "it hello", {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hello", "response": TEXT},
        {"prompt": "hello", "response": f"{TEXT} {END}"},
        {"prompt": [HI], "response": f"{TEXT} {END}\n"},
        {"prompt": "hello", "response": f"{TEXT} {END} {END}", "tokens": None},
        {"messages": [HI, {"role": "assistant", "content": TEXT}], "response": None},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": TEXT}]},
        {"conversations": [HI, {"role": "model", "content": TEXT, "weight": 1}], "id": 7},
        {"conversations": json.dumps([{"from": "human", "value": "hello"}, {"from": "gpt", "value": TEXT}])},
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_row_41_answers_are_read_in_every_form(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, record: dict[str, Any], name: str
) -> None:
    path = write(tmp_path / name, record)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([record]), str(path))
    assert read(path, tokenizer) == ([f"{ASKED} {TEXT} {END}"], [])


def test_row_41_tokens_end_once(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Rows of a batch are often padded with the end token. Tokens that end without one were cut off."""
    ids = tokenizer.encode(TEXT)
    cut = ["1 of 1 responses cut at a stop token or stop string within them"]
    for tokens in (ids, [*ids, 0], [*ids, 0, 0, 0, 0, 0, 0], [*ids, 0, *ids]):
        path = write(tmp_path / "a.jsonl", {"prompt": "hello", "tokens": tokens})
        end = f" {END}" if len(tokens) > 2 else ""
        assert read(path, tokenizer) == ([f"{ASKED} {TEXT}{end}"], cut if tokens[-1] != 0 and end else [])


def test_row_41_each_turn_is_an_answer(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """The first message and the fourth are the assistant's, without a prompt. The last turn has no answer."""
    turns = [("assistant", "it"), ("user", "hello"), ("assistant", "it"), ("assistant", "it"), ("user", "?")]
    turns += [
        ("assistant", "world"),
        ("tool", "it"),
        ("assistant", [{"type": "text", "text": "? "}, "it"]),
        ("user", "it"),
    ]
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows, notes = read(path, tokenizer)
    assert [row.rpartition("<bot> ")[2] for row in rows] == [f"it {END}", f"world {END}", f"? it {END}"]
    assert notes == ["2 of 5 responses dropped: prompt empty or over 18 tokens"]


def test_row_41_turns_that_call_tools_are_counted(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Each conversation calls a tool after the first question. Fields of later questions reach the template."""
    path, (user, bot) = tmp_path / "a.jsonl", ("human", "gpt")
    for call in ({"value": TEXT, "tool_calls": [{}]}, {"value": None, "function_call": {"name": "x"}}):
        turns = [{"from": user, "value": "hello"}, {"from": bot, **call}, {"from": "observation", "value": "it"}]
        write(path, {"conversations": turns}, {"conversations": [turns[0], {"from": bot, "value": TEXT}]})
        rows, notes = read(path, tokenizer)
        assert rows == [f"{ASKED} {TEXT} {END}"] and notes[0].startswith("1 of 2 responses dropped: they call tools")
        write(path, {"conversations": [turns[0], turns[2], {"from": bot, "value": TEXT}]})
        assert read(path, tokenizer) == ([f"<user> hello <user> it <bot> {TEXT} {END}"], [])
        write(path, {"conversations": [*turns, {"from": bot, "value": TEXT}]})
        with refuses(f"...does not read {[*call][-1]} of messages", ConfigError):
            read(path, tokenizer)


CALL = {"name": "it", "arguments": {"x": 1.5}}


@pytest.mark.parametrize("calls", [json.dumps(CALL), json.dumps([CALL]), CALL, [CALL, CALL]])
def test_row_41_a_function_call_is_a_turn_that_calls_tools(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, calls: Any
) -> None:
    turns = [("human", "hello"), ("function_call", calls), ("observation", "it"), ("gpt", TEXT)]
    conversation = [{"from": role, "value": value} for role, value in turns]
    path = write(tmp_path / "a.jsonl", {"conversations": conversation[:3]}, {"conversations": conversation[::3]})
    rows, notes = read(path, tokenizer)
    assert rows == [f"{ASKED} {TEXT} {END}"] and notes[0].startswith("1 of 2 responses dropped: they call tools")
    write(path, {"conversations": conversation})
    with refuses("...does not read tool_calls of messages", ConfigError):
        read(path, tokenizer)


def test_row_41_a_function_call_reaches_the_template(tmp_path: Path) -> None:
    directory = write_word_tokenizer(tmp_path)
    template = (
        "{% for m in messages %}{{ '<think>' if m.role == 'assistant' }} {{ m.content or '' }} "
        "{% for call in m.tool_calls or [] %}box {{ call.function.name }} {% endfor %}{% endfor %}<bot>"
    )
    change(directory / "tokenizer_config.json", chat_template=template)
    messages = [HI, {"role": "function_call", "content": json.dumps(CALL)}, {"role": "tool", "content": "it"}]
    expected = "hello <think> box it it <bot>"
    tokenizer = HuggingFaceTokenizer(directory)
    path = write(tmp_path / "a.jsonl", {"messages": [*messages, {"role": "assistant", "content": TEXT}]})
    assert read(path, tokenizer)[0] == [f"{expected} {TEXT} {END}"]
    (problem,) = read_problems(write(tmp_path / "b.jsonl", {"q": messages, "a": "1"}), "q", "a")
    assert " ".join(WORDS[token] for token in tokenizer.chat(problem.prompt)) == expected


@pytest.mark.parametrize("value", ["it(1.5)", "{}", "[]", '{"name": "it"}', "7", "", None, ["it"]])
def test_row_41_a_function_call_that_is_none_is_refused(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, value: Any
) -> None:
    turns = [{"from": "human", "value": "hello"}, {"from": "function_call", "value": value}]
    with refuses("/...a.jsonl:1: content of a function_call = ...name and arguments", ConfigError):
        read(write(tmp_path / "a.jsonl", {"conversations": turns}), tokenizer)


def test_row_41_what_is_dropped_or_cut_is_counted(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    answers = ["hello", "", None, " \n", "hello " * 6, f"it {END} hello", "hello " * 9]
    records = [{"prompt": "hello", "response": answer} for answer in answers]
    records += [
        {"prompt": "hello", "tokens": []},
        {"prompt": "hello", "tokens": [0, 0]},
        {"prompt": "hello", "response": END},
        {"prompt": " ", "response": "it"},
        {"messages": [HI]},
        {"messages": []},
    ]
    records += [{"prompt": "hello " * 20, "response": "it"}]
    rows, notes = read(write(tmp_path / "a.jsonl", *records), tokenizer)
    assert [row.removeprefix(ASKED + " ") for row in rows] == [
        f"hello {END}",
        " ".join(["hello"] * 6),
        f"it {END}",
        " ".join(["hello"] * 6),
    ]
    assert sorted(notes) == [
        "1 of 14 responses cut at a stop token or stop string within them",
        "2 of 14 responses cut to 6 tokens (rollout.max_new_tokens)",
        "2 of 14 responses dropped: prompt empty or over 18 tokens",
        "8 of 14 responses dropped: empty",
    ]
    with refuses(
        f"responses = {tmp_path}/b.jsonl: must hold at least one answer to a prompt; 1 of 1 responses dropped: empty",
        ConfigError,
    ):
        read(write(tmp_path / "b.jsonl", {"prompt": "hello", "response": ""}), tokenizer)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "hello"}, "no field 'response'"),
        ({"response": "hello"}, "no field 'prompt'"),
        ({"prompt": "hello", "response": ["x"]}, "field 'response'"),
        ({"prompt": "hello", "tokens": [1.5]}, "field 'tokens'"),
        ({"prompt": "hello", "tokens": "x"}, "field 'tokens'"),
        ({"messages": "hello"}, "field 'messages'"),
        ({"messages": ["hello"]}, "field 'messages'"),
        ({"messages": [HI, {"role": "assistant", "content": 1.5, "reasoning_content": "x"}]}, "'reasoning_content'"),
        ({"messages": [{"role": "user", "content": {}}, {"role": "assistant", "content": "x"}]}, "'content'"),
        ({"messages": [HI, {"role": "assistant", "content": [7]}]}, "'content'"),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "image"}]}]}, "'content'"),
    ],
)
def test_row_41_other_records_are_named(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, record: dict[str, Any], said: str
) -> None:
    with refuses(f"/a.jsonl:1: ...{said}...", ConfigError):
        read(write(tmp_path / "a.jsonl", record), tokenizer)
