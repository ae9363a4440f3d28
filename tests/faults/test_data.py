"""Faults in the inputs of a run: problems, tokenizers, chat templates."""

import json
from pathlib import Path

import pytest

from launch.data.batches import PromptTable
from launch.data.problems import Problem, read_problems, split
from launch.data.prompts import Message, prompt_fields, prompt_text
from launch.data.responses import worked_solutions
from launch.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from launch.errors import ConfigError
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import refuses

CHAT = (Message("system", "it"), Message("user", "hello"))


def jsonl(path: Path, *records: object, mark: str = "") -> Path:
    path.write_text(mark + "\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_row_02_a_gap_in_the_ids_counts(tmp_path: Path) -> None:
    directory = write_word_tokenizer(tmp_path)
    contents = json.loads((directory / "tokenizer.json").read_text())
    contents["model"]["vocab"]["<tool>"] = 30
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    tokenizer = HuggingFaceTokenizer(directory)
    assert tokenizer.vocab_size == 31 > len(WORDS) + 1
    assert tokenizer.encode("hello <tool>") == [5, 30] and tokenizer.decode([5, 30, 20]) == "hello <tool>"


@pytest.mark.parametrize("wrong", [-1, 12, 2**31])
def test_row_02_ids_beyond_the_policy_are_refused(wrong: int) -> None:
    class Wrong(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [3, wrong] if "!" in text else [3]

    tokenizer, problems = Wrong(), [Problem(prompt=text, answer="", solution="x") for text in ("a", "b!")]
    PromptTable.build(problems[:1], tokenizer, 4, vocab_size=12)
    with refuses(f"the prompt of problem 1...{wrong}...0 .. 11", ConfigError):
        PromptTable.build(problems, tokenizer, 4, vocab_size=12)
    tokenizer.stop_tokens = (4,)
    with refuses(f"problem 0 with its solution...{wrong}...0 .. 11", ConfigError):
        worked_solutions([Problem(prompt="a", answer="", solution="!")], tokenizer, 9, vocab_size=12)


@pytest.mark.parametrize(
    ("listed", "stops"), [([3, 0], (0, 3)), ([1, 0], (0, 1)), (1, (0, 1)), (0, (0,)), (None, (0,)), ([], (0,))]
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_row_03_stop_tokens_are_of_all_files(tmp_path: Path, file: str, listed: object, stops: tuple[int, ...]) -> None:
    directory = write_word_tokenizer(tmp_path)
    (directory / "generation_config.json").unlink()
    (directory / file).write_text(json.dumps({"eos_token_id": listed}))
    assert HuggingFaceTokenizer(directory).stop_tokens == stops
    change(directory / "tokenizer_config.json", eos_token=None)
    (directory / file).write_text(json.dumps({"eos_token_id": 0}))
    assert HuggingFaceTokenizer(directory).stop_tokens == (0,)


@pytest.mark.parametrize("listed", ["259", [0, "1"], -1, 1.5, True, {}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_row_03_stop_tokens_of_another_type_are_refused(tmp_path: Path, file: str, listed: object) -> None:
    directory = write_word_tokenizer(tmp_path)
    (directory / file).write_text(json.dumps({"eos_token_id": listed}))
    with refuses(f"model.path = ...eos_token_id = {listed!r}...{file}", ConfigError):
        HuggingFaceTokenizer(directory)


def test_row_09_no_problem_is_left_to_train_on() -> None:
    problems = [Problem(prompt=str(i % 2), answer="") for i in range(8)]
    with refuses("data.held_out_count = 2: ...6", ConfigError):
        split(problems, 2)


@pytest.mark.parametrize("field", ["q", "a", "s"])
def test_row_09_half_a_surrogate_pair_is_named(tmp_path: Path, field: str) -> None:
    good = {"q": "x", "a": "1", "s": "\U0001f600"}
    path = jsonl(tmp_path / "a.jsonl", good, good | {field: "a\ud83d"})
    with refuses(f"/...a.jsonl:2: field '{field}'", ConfigError):
        read_problems(path, "q", "a", "s")


def test_row_09_a_byte_order_mark_is_not_text_and_a_system_message_may_be_empty(tmp_path: Path) -> None:
    chat = (Message("system", ""), Message("user", "hello"))
    records = {"q": "x", "a": 1}, {"q": prompt_fields(chat), "a": "1"}
    path = jsonl(tmp_path / "a.jsonl", *records, mark="\ufeff")
    assert read_problems(path, "q", "a") == [Problem(prompt=prompt, answer="1") for prompt in ("x", chat)]


def test_row_09_messages_and_nested_fields_are_read(tmp_path: Path) -> None:
    record = {"prompt": prompt_fields(CHAT), "reward_model": {"ground_truth": 18}, "a.b": "dotted"}
    path = jsonl(tmp_path / "a.jsonl", record)
    (problem,) = read_problems(path, "prompt", "reward_model.ground_truth", "a.b")
    assert problem == Problem(prompt=CHAT, answer="18", solution="dotted")
    assert prompt_text(problem.prompt) == "it\nhello" and prompt_fields(problem.prompt) == record["prompt"]
    tokenizer = HuggingFaceTokenizer(write_word_tokenizer(tmp_path), instruction="{prompt} ?")
    assert " ".join(WORDS[i] for i in tokenizer.chat(problem.prompt)) == "<user> it <user> hello ? <bot>"
    asked = '[{"role": "system", "content": "it"}, '
    with refuses(f"data.prompt_field: prompt = {asked}...chat template...must name a field of text", ConfigError):
        ByteTokenizer().chat(problem.prompt)
    with refuses("data.answer_field = reward_model.style: ...a.jsonl:1 has no such field", ConfigError):
        read_problems(path, "prompt", "reward_model.style")


@pytest.mark.parametrize(
    "messages",
    [[], ["x"], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 1.5, "content": [1]}]]
    + [prompt_fields((Message("user", "x"), Message("assistant", "y"))), [{"role": "user", "content": " "}]]
    + [[{"role": "user", "content": ""}]],
)
def test_row_09_messages_of_another_shape_are_named(tmp_path: Path, messages: object) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"q": messages, "a": "1"})
    with refuses("/...a.jsonl:1: ", ConfigError):
        read_problems(path, "q", "a")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0].content + 1 }}", ""),
        ([{"name": "tools", "template": "x"}], ""),
    ],
    ids=["raises", "syntax", "type", "named"],
)
def test_row_11_a_chat_template_that_fails_is_one_line(tmp_path: Path, template: object, words: str) -> None:
    directory = write_word_tokenizer(tmp_path)
    change(directory / "tokenizer_config.json", chat_template=template)
    with refuses(f"model.path = {directory}: ...chat template...{words}", ConfigError):
        HuggingFaceTokenizer(directory).chat("hello")
