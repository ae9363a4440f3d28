import sys
from pathlib import Path

import pytest

from launch.data.prompts import Message
from launch.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from launch.errors import ConfigError
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import refuses


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "7+5=12;\n#é…"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat(text) == tokenizer.encode(text)
    assert max(tokenizer.stop_tokens) < tokenizer.vocab_size
    # Ids that are not text are skipped.
    assert ByteTokenizer().decode([-1, 65, 300, 66, 256]) == "AB"
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_encoding_adds_nothing_and_decoding_drops_stops(directory: Path):
    tokenizer = HuggingFaceTokenizer(directory)
    assert tokenizer.encode("hello world") == [5, 6]
    assert tokenizer.decode([2, 5, 6, 1, 0, 10, -1]) == "hello world"
    assert tokenizer.vocab_size == len(WORDS)


@pytest.mark.parametrize(("thinking", "ending"), [(None, "<bot>"), (True, "<bot> <think> ?"), (False, "<bot> <think>")])
def test_the_template_has_the_variables_that_are_set(directory: Path, thinking: bool | None, ending: str):
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    ids = HuggingFaceTokenizer(directory, template_kwargs=kwargs).chat("hello")
    assert words(ids) == f"<user> hello {ending}"
    with refuses("data.chat_template_kwargs = ...tokenize", ConfigError):
        HuggingFaceTokenizer(directory, template_kwargs=kwargs | {"tokenize": False})


def test_the_system_prompt_comes_before_prompts_without_one(directory: Path):
    tokenizer = HuggingFaceTokenizer(directory, system_prompt="box", instruction="{prompt} it")
    assert words(tokenizer.chat("hello")) == "<user> box <user> hello it <bot>"
    own = (Message("system", "?"), Message("user", "world"))
    assert words(tokenizer.chat(own)) == "<user> ? <user> world it <bot>"
    change(directory / "tokenizer_config.json", chat_template=None)
    with refuses(f"data.system_prompt = box: ...model.path = {directory}", ConfigError):
        HuggingFaceTokenizer(directory, system_prompt="box")
    with refuses("data.chat_template_kwargs = {'a': 1}: ...", ConfigError):
        HuggingFaceTokenizer(directory, template_kwargs={"a": 1})


def test_the_instruction_wraps_the_prompt(directory: Path):
    tokenizer = HuggingFaceTokenizer(directory, instruction="{prompt} box it {{}}")
    assert words(tokenizer.chat("hello")) == "<user> hello box it ? <bot>"
    assert words(tokenizer.chat("{world}")) == "<user> ? box it ? <bot>"
    assert repr(tokenizer) == f"HuggingFaceTokenizer({str(directory)!r}, vocab_size={tokenizer.vocab_size})"


def test_without_a_template_the_prompt_gets_the_tokenizers_own_special_tokens(directory: Path):
    change(directory / "tokenizer_config.json", chat_template=None)
    assert words(HuggingFaceTokenizer(directory).chat("hello")) == "<user> hello"


@pytest.mark.parametrize("instruction", ["no place", "{other}", "{}", "{prompt", "{prompt.x}", "{prompt} \\boxed{}"])
def test_malformed_instructions_are_config_errors(directory: Path, instruction: str):
    with refuses("data.instruction = ...{prompt}", ConfigError):
        HuggingFaceTokenizer(directory, instruction=instruction)


def test_missing_directories_files_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    with refuses("model.path = ...must hold a tokenizer.json", ConfigError):
        HuggingFaceTokenizer(tmp_path)
    with refuses("model.path = ...nowhere:", ConfigError):
        HuggingFaceTokenizer(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refuses("model.path = ...transformers...pip install", ConfigError):
        HuggingFaceTokenizer(tmp_path)


def test_a_malformed_generation_config_is_named(directory: Path):
    for text in ("{", "[]"):
        (directory / "generation_config.json").write_text(text)
        with refuses("model.path = ...generation_config.json", ConfigError):
            HuggingFaceTokenizer(directory)
