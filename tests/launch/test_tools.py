import json
import subprocess
import sys
from typing import Any, Literal

import pytest

from launch.environments.calls import FORMATS, Call, find_calls, format_of
from launch.environments.schema import tool_schemas
from launch.environments.tools import Tools
from launch.errors import ConfigError
from tests.refusals import refuses


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


async def repeat(text: str, times: int | None = None, kind: Literal["x", "y"] = "x"):
    """Repeat a text.

    Args:
        text: What to repeat.
        times: How often.
        kind: How.
    """
    return {"text": text, "times": times, "kind": kind, "set": {1}}


class Files:
    def read(self, path: str):
        """Read a file.

        Args:
            path: Where it is.
        """
        raise SystemExit(f"cannot read {path}")


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def contents(turn: str, format: str = "hermes") -> list[str]:
    """Return what the tools answer to a turn. Verify that the episode goes on, and that a tool answered."""
    step = Tools([add, repeat, Files().read], format).step(turn)
    assert not step.done and step.reward == 0
    assert all(message["role"] == "tool" for message in step.observation)
    return [message["content"] for message in step.observation]


def error(turn: str, format: str = "hermes") -> str:
    """Return the error that answers the only call of a turn."""
    (content,) = contents(turn, format)
    (text,) = json.loads(content).values()
    assert json.loads(content) == {"error": text}
    return text


def test_calls_are_answered_in_order_and_a_turn_without_calls_ends_the_episode():
    turn = hermes(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "repeat", "arguments": {"text": "é", "times": 2}}',
        '{"name": "add", "arguments": {"a": 40, "b": 2}}',
    )
    repeated = '{"text": "é", "times": 2, "kind": "x", "set": "{1}"}'
    assert contents(f"Two sums. {turn}") == ["3", repeated, "42"]
    names = [message["name"] for message in Tools([add, repeat], "hermes").step(turn).observation]
    assert names == ["add", "repeat", "add"]
    assert Tools([add], "hermes").step("The sum is 3.").done


def test_what_a_tool_prints_is_no_answer(capsys: pytest.CaptureFixture[str]):
    def shout() -> str:
        print("noise")
        return "text as it is"

    (message,) = Tools([shout], "hermes").step(hermes('{"name": "shout", "arguments": {}}')).observation
    assert message["content"] == "text as it is"
    assert capsys.readouterr().out == "noise\n"


@pytest.mark.parametrize(
    ("raised", "answer"),
    [
        (ValueError("too big"), "ValueError: too big"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
    ids=str,
)
def test_an_exception_is_the_answer(raised: BaseException, answer: str):
    def fails() -> None:
        raise raised

    (message,) = Tools([fails], "hermes").step(hermes('{"name": "fails"}')).observation
    assert json.loads(message["content"]) == {"error": answer}


def test_an_exception_whose_text_raises_is_answered_by_its_type():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fails() -> None:
        raise Mute

    (message,) = Tools([fails], "hermes").step(hermes('{"name": "fails"}')).observation
    assert json.loads(message["content"]) == {"error": "Mute"}


def test_a_result_that_no_json_can_state_is_an_error():
    def circle() -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    (message,) = Tools([circle], "hermes").step(hermes('{"name": "circle"}')).observation
    assert json.loads(message["content"])["error"].startswith("ValueError: Circular")


def test_wrong_calls_are_told_what_is_allowed():
    assert error(hermes('{"name": "sum", "arguments": {}}')) == "unknown tool 'sum'; the tools are add, repeat, read"
    missing, extra = hermes('{"name": "add"}'), hermes('{"name": "add", "arguments": {"a": 1, "c": 2}}')
    assert error(missing) == "add: missing a required argument: 'a'; its arguments are: a: int, b: int = 2"
    assert error(extra) == "add: got an unexpected keyword argument 'c'; its arguments are: a: int, b: int = 2"
    assert error(hermes('{"name": "read", "arguments": {"path": "x"}}')) == "SystemExit: cannot read x"
    listed = error(hermes('{"name": "add", "arguments": [1]}'))
    assert listed.startswith("arguments of add that are no JSON object; a call is written <tool_call>")


@pytest.mark.parametrize(
    ("format", "turn", "fault"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}', "malformed JSON"),
        ("hermes", hermes('{"name": "add"} and more'), "text after the JSON object"),
        ("hermes", hermes("[" * 200_000), "JSON that is nested too deep"),
        ("hermes", hermes('"add"'), "no JSON object"),
        ("hermes", hermes('{"arguments": {}}'), "a call that is no JSON object with a name"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n", "a function or a parameter that is not"),
        ("qwen3_coder", hermes('{"name": "add"}'), "a call without <function=..>"),
        ("llama3", '{"name": "add", "parameters": {', "malformed JSON"),
        ("llama3", "<|python_tag|>add.call(a=1)", "no JSON object with name and parameters"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "malformed JSON"),
        ("mistral", '[TOOL_CALLS] ["add"]', "a call that is no JSON object with a name"),
    ],
)
def test_a_call_that_cannot_be_read_is_answered_with_an_example(format: str, turn: str, fault: str):
    text = error(turn, format)
    assert text.startswith(fault)
    assert text.endswith(FORMATS[format].example)


@pytest.mark.parametrize(
    ("format", "turn", "calls"),
    [
        (
            "hermes",
            # A stop string may have cut the last marker.
            hermes('{"name": "f", "arguments": {"code": "a\nb", "end": "</tool_call>"}}') + '<tool_call>{"name": "g"}',
            [Call("f", {"code": "a\nb", "end": "</tool_call>"}), Call("g")],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=code>\na\n\nb\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<function=g>\n</function>",
            [Call("f", {"code": "a\n\nb", "n": "3"}, are_texts=True), Call("g", are_texts=True)],
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {"a": {"b": 1}}}; {"name": "g", "arguments": {}}',
            [Call("f", {"a": {"b": 1}}), Call("g")],
        ),
        ("llama3", ' {"name": "f", "parameters": {}}', [Call("f")]),
        ("llama3", 'The set {"name"} is {x}.', []),
        ("llama3", '{"x": 1}', []),
        (
            "mistral",
            'Now[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g"}]',
            [Call("f", {"a": 1}, "abcdefghi"), Call("g")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{}',
            [Call("f", {"a": "[TOOL_CALLS]"}), Call("g", id="abcdefghi"), Call("h")],
        ),
    ],
)
def test_calls_are_found_in_the_formats_of_families(format: str, turn: str, calls: list[Call]):
    assert find_calls(turn, format) == calls


@pytest.mark.parametrize("thinking", ["<think>{}</think>", "{}</think>", "<think>{}", "[THINK]{}[/THINK]"])
def test_thinking_holds_no_calls(thinking: str):
    call = hermes('{"name": "add", "arguments": {"a": 1}}')
    assert find_calls(thinking.format(call), "hermes") == []
    if not thinking.endswith("{}"):
        assert find_calls(thinking.format("x") + call, "hermes") == [Call("add", {"a": 1})]


def test_texts_of_xml_calls_are_read_by_type_hints():
    def called(text: str, times: str, kind: str = "y") -> Any:
        parameters = {"text": text, "times": times, "kind": kind}
        written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
        (content,) = contents(f"<tool_call>\n<function=repeat>\n{written}</function>\n</tool_call>", "qwen3_coder")
        return json.loads(content)

    assert called("3", "3") == {"text": "3", "times": 3, "kind": "y", "set": "{1}"}
    assert called("null", "None")["times"] is None
    assert called("null", "None")["text"] == "null"
    assert called("", "[True]")["times"] == [True]
    assert called("", "many")["times"] == "many"


def test_the_numbers_of_calls_are_answered():
    (message,) = Tools([add], "mistral").step('[TOOL_CALLS] [{"name": "add", "id": "abcdefghi"}]').observation
    assert message["tool_call_id"] == "abcdefghi"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (r"{{ '<tool_call>\n{\"name\": ' }}{{ call.arguments | tojson }}", "hermes"),
        ("{{ '<tool_call>\n<function=' + call.name }}<parameter={{ call.arguments }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("""{{ '"parameters": ' }}<|start_header_id|>ipython""", "llama3"),
    ],
)
def test_the_format_is_found_in_the_chat_template(template: str, format: str):
    assert format_of(template) == format


@pytest.mark.parametrize("template", ["{{ message.content }}", "<tool_call>{{ name }}<arg_key>{{ arguments }}"])
def test_a_template_without_a_known_format_is_refused(template: str):
    with refuses("environment.calls = None: ...hermes", ConfigError):
        format_of(template)


def test_schemas_come_from_signatures_and_docstrings():
    pytest.importorskip("transformers")
    schemas = tool_schemas([add, repeat, Files().read])
    assert [schema["function"]["name"] for schema in schemas] == ["add", "repeat", "read"]
    assert schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "First number."},
            "b": {"type": "integer", "description": "Second number."},
        },
        "required": ["a"],
    }
    assert [*schemas[2]["function"]["parameters"]["properties"]] == ["path"]


def bare(a: int): ...


def unhinted(a):
    """Do.

    Args:
        a: It.
    """


def undescribed(a: int):
    """Do."""


def many(*a: int):
    """Do.

    Args:
        a: They.
    """


@pytest.mark.parametrize(
    ("function", "missing"),
    [(bare, "docstring"), (unhinted, "a is missing a type hint"), (undescribed, "argument 'a'"), (many, "*a: int")],
)
def test_a_tool_without_a_description_is_refused(function: Any, missing: str):
    pytest.importorskip("transformers")
    with refuses(f"environment.tools = {function.__name__}: ...{missing}...must have a docstring", ConfigError):
        tool_schemas([add, function])


def test_what_is_no_function_and_two_tools_of_one_name_are_refused():
    pytest.importorskip("transformers")
    with refuses("environment.tools = ...must be functions", ConfigError):
        tool_schemas([Files])
    with refuses("environment.tools = add, add: two tools are named add", ConfigError):
        tool_schemas([add, add])


def test_tools_import_nothing_heavy():
    code = "import sys, launch.environments.tools; print({'jax', 'numpy', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
