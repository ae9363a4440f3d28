"""Faults between text and tokens: stop tokens, special tokens, messages and chat templates."""

import json
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run
from launch.data import chat_template
from launch.data.answer_files import load_answers
from launch.data.problems import Problem, read_problems
from launch.data.prompts import prompt_fields
from launch.data.responses import worked_solutions
from launch.data.tokenizer_files import state_stops
from launch.data.tokenizers import Tokenizer, token_texts
from launch.rewards.reward_fn import traced_exact
from launch.run import pin_references
from launch.run.directory import open_run, record_config
from launch.run.pin_references import with_commits
from launch.setup.experiment import build_experiment
from launch.setup.problems import build_tokenizer
from specjax.types import Prompts, Rollout
from tests.launch.programs import SMALLEST
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import assert_refused, refuses

EOS, END, BOT, BOX = 0, 1, 3, 7  # ids of words; the tokenizer's stop token is EOS, the model's are END and EOS
SUM = 10  # the id of + among the characters of sums


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


def tokenizer_of(directory: Path | None, **options: Any) -> Tokenizer:
    """Return a run's tokenizer. options: of the recipe, with "__" for a dot."""
    config = RunConfig(name="x", steps=1)
    given = {"model.path": str(directory)} if directory is not None else {"data.tokenizer": "bytes"}
    return build_tokenizer(
        override(config, given | {name.replace("__", "."): value for name, value in options.items()})
    )


@pytest.mark.parametrize(
    ("given", "replaced", "stops"),
    [
        ((), False, (EOS, END)),
        ((BOX,), False, (EOS, END, BOX)),
        ((END, BOX), True, (END, BOX)),
        ((EOS,), True, (EOS,)),
        ((12, 2**31 - 1), False, (EOS, END, 12, 2**31 - 1)),  # of the policy's vocabulary, not the tokenizer's
        (("box", "<end>", BOX), False, (EOS, END, BOX)),
        (("<eos>",), True, (EOS,)),
    ],
)
def test_row_33_stop_tokens_are_one_list(
    directory: Path, given: tuple[int | str, ...], replaced: bool, stops: tuple[int, ...]
) -> None:
    tokenizer = tokenizer_of(directory, rollout__stop_tokens=given, rollout__replace_stop_tokens=replaced)
    assert tokenizer.stop_tokens == stops
    assert tokenizer.decode([5, *stops, 6]) == "hello world"
    assert tokenizer.decode([5, END]) == ("hello" if END in stops else "hello <end>")
    answers = worked_solutions([Problem(prompt="hello", answer="", solution="it")], tokenizer, 9, vocab_size=12)
    assert answers.completions.tolist() == [8, stops[0]]
    (directory / "a.jsonl").write_text(json.dumps({"prompt": "hello", "response": "it"}))
    answers, _ = load_answers(directory / "a.jsonl", tokenizer, 9, 9, vocab_size=12)
    assert answers.completions.tolist() == [8, stops[0]]


def test_row_33_a_rollout_ends_at_all_of_them_and_any_of_them_ends_a_traced_answer() -> None:
    options = {"rollout.stop_tokens": (2,), "rollout.draft_length": 0, "draft.kind": "none"}
    experiment = build_experiment(override(SMALLEST, options), training=False)
    assert experiment.config.rollout.stop_tokens == experiment.tokenizer.stop_tokens == (14, 2)
    byte = tokenizer_of(None, rollout__stop_tokens=(258,))
    reward = traced_exact([Problem(prompt="", answer="7")], byte)
    endings = [byte.encode("1#7") + [token] for token in (256, 258, 257, 10)] + [byte.encode("1#7"), byte.encode("#7")]
    tokens = np.zeros((len(endings), 5), np.int32)
    for row, ending in zip(tokens, endings, strict=True):
        row[: len(ending)] = ending
    rollout = Rollout(jnp.array(tokens), jnp.array(list(map(len, endings))))
    prompts: Any = Prompts(tokens=None, lengths=None, id=jnp.zeros(len(endings), jnp.int32))
    assert reward(rollout, prompts).value.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it box", "2 tokens of the tokenizer, ['it', 'box']"),
        ("nothing", "read as '?'"),
        (" it", "read as 'it'"),
        ("", "0 tokens"),
        ("\ud800", "0 tokens"),
    ],
)
def test_row_33_stop_text_that_is_not_one_token_is_refused(directory: Path, text: str, found: str) -> None:
    with refuses(f"rollout.stop_tokens = {text!r}: {found}...must be ids, or text that is exactly one", ConfigError):
        tokenizer_of(directory, rollout__stop_tokens=(BOX, text))


def test_row_33_stop_text_that_is_another_token_within_a_text_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_word_tokenizer(tmp_path)
    pieces = [("?", 0.0), ("\u2581User", -1.0), ("User", -1.0), ("\u2581", -2.0), ("\n", -2.0), ("#", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path / "generation_config.json", eos_token_id=[6])
    with refuses("rollout.stop_tokens = 'User': token 1 at the start of a text, 2 within; ", ConfigError):
        tokenizer_of(tmp_path, rollout__stop_tokens=("User",))


@pytest.mark.parametrize(("text", "token"), [("\n", 10), ("=", 61)])
def test_row_33_stop_text_may_be_a_byte(text: str, token: int) -> None:
    assert tokenizer_of(None, rollout__stop_tokens=(text,)).stop_tokens == (256, token)


@pytest.mark.parametrize(("text", "found"), [("\n\n", "2 tokens"), ("\ud800", "0 tokens")])
def test_row_33_stop_text_of_other_than_one_byte_is_refused(text: str, found: str) -> None:
    with refuses(f"rollout.stop_tokens = {text!r}: {found}", ConfigError):
        tokenizer_of(None, rollout__stop_tokens=(text,))


def test_row_33_an_experiment_has_the_ids_of_stop_text() -> None:
    options = {"rollout.draft_length": 0, "draft.kind": "none"}
    for given in ("+",), (SUM, "+"):
        config = override(SMALLEST, options | {"rollout.stop_tokens": given})
        assert build_experiment(config, training=False).config.rollout.stop_tokens == (14, SUM)
    with refuses("rollout.stop_tokens = 'x': 0 tokens", ConfigError):
        build_experiment(override(SMALLEST, options | {"rollout.stop_tokens": ("x",)}), training=False)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["1,2", "3"], (1, 2, 3)),
        (["<|eot_id|>", "5"], ("<|eot_id|>", 5)),
        ([","], (",",)),
        (["1,b"], ("1,b",)),
        ([""], ("",)),
    ],
)
def test_row_33_the_option_reads_ids_and_text(words: list[str], value: tuple[int | str, ...]) -> None:
    config = parse_run(["tiny", "--rollout.stop-tokens", *words], "prog", "Do.")
    assert config.rollout.stop_tokens == value


def test_row_33_ids_of_stop_tokens_are_in_range() -> None:
    with refuses("rollout.stop_tokens = (-1,): ...at least 0...or text", ConfigError):
        parse_run(["tiny", "--rollout.stop-tokens", "-1"], "prog", "Do.")


@pytest.mark.parametrize(
    ("stops", "generation", "config"),
    [
        ((EOS, END), [END, EOS], EOS),
        ((EOS, END, BOX), [EOS, END, BOX], EOS),
        ((BOX,), [BOX], [BOX]),
        ((EOS,), [EOS], EOS),
    ],
)
def test_row_33_an_export_names_the_stop_tokens_of_its_run(
    directory: Path, stops: tuple[int, ...], generation: object, config: object
) -> None:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    change(directory / "generation_config.json", top_k=20)
    state_stops(directory, stops, ())
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": generation, "top_k": 20}
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == config


def test_row_33_a_model_without_an_end_token_needs_one(directory: Path) -> None:
    change(directory / "tokenizer_config.json", eos_token=None)
    (directory / "generation_config.json").unlink()
    with refuses(f"rollout.stop_tokens = ()...model.path = {directory}", ConfigError):
        tokenizer_of(directory)
    assert tokenizer_of(directory, rollout__stop_tokens=(BOT,)).stop_tokens == (BOT,)
    with refuses("rollout.replace_stop_tokens = True: ...stop_tokens"):
        tokenizer_of(directory, rollout__replace_stop_tokens=True)


@pytest.fixture
def tagged(directory: Path) -> Path:
    """Return a tokenizer of which <think>, </think> and <s> are special tokens."""
    contents = json.loads((directory / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for token, text in ((4, "<think>"), (10, "</think>"), (11, "<s>")):
        contents["added_tokens"].append({"id": token, "content": text} | flags)
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    return directory


@pytest.mark.parametrize(("kept", "text"), [(False, "hello it"), (True, "<think> hello </think> it <s>")])
def test_row_39_scorers_get_special_tokens_on_request(tagged: Path, kept: bool, text: str) -> None:
    tokenizer = tokenizer_of(tagged, reward__keep_special_tokens=kept)
    assert tokenizer.decode([4, 5, 10, 8, 11, END, EOS]) == text
    answers = "".join(token_texts(tokenizer, [4, 5, 10, 8, 11, END, EOS]))
    assert answers == text


@pytest.mark.parametrize(
    ("options", "missed"),
    [
        (dict(scorer="regex", pattern=r"<think>.*</think>\s*(\d+)"), "pattern = ...: </think>, <think> are cut"),
        (dict(scorer="regex", pattern=r"\<(?:think|reason)\>(.*)"), "pattern = ...: </think>, <think> are cut"),
        (dict(scorer="regex", pattern=r"(.*)<eos>"), "pattern = ...: <eos> are cut"),
        (dict(scorer="regex", pattern=r"(?P<think>\d+)"), None),
        (dict(scorer="regex", pattern=r"think of <(\d+\s)"), "pattern = ...: </think>, <think> are cut"),
        (dict(scorer="exact", also=("format",)), r"format = \s*<think>...: </think>, <think> are cut"),
        (dict(scorer="my_module:score"), "scorer = my_module:score: </think>, <think> are cut"),
        (dict(scorer="exact"), None),
        (dict(scorer="my_module:score", keep_special_tokens=True), None),
        (dict(scorer="regex", pattern=r"<think>(.*)<eos>", keep_special_tokens=True), "pattern = ...: <eos> are cut"),
    ],
)
def test_row_39_a_scorer_that_looks_for_cut_tokens_is_named(
    tagged: Path, options: dict[str, Any], missed: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer_of(tagged, **{f"reward__{name}": value for name, value in options.items()})
    assert len(caplog.records) == (missed is not None)
    if missed is not None:
        assert_refused(caplog.records[0].getMessage(), f"reward.{missed}...reward.keep_special_tokens")


DATED = "{{ messages[0].content }} {{ 'it' if strftime_now('%Y-%m-%d %H:%M:%S') == '2026-01-02 03:04:05' else '?' }}"


def test_row_32_a_run_keeps_the_time_that_its_template_shows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(directory / "tokenizer_config.json", chat_template=DATED)
    config, run = override(RunConfig(name="x", steps=1), {"model.path": str(directory)}), directory / "run"
    now = Mock(wraps=datetime, **{"now.return_value": datetime(2026, 1, 2, 3, 4, 5)})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(pin_references, "datetime", now)
    started = with_commits(config, starts=True)
    assert started.data.chat_template_time == "2026-01-02T03:04:05"
    with open_run(replace(started, out=str(run))) as path:
        record_config(path, replace(started, out=str(run)), report=str)
    now.now.return_value = datetime(2027, 1, 1)
    # Programs that read the run, and a start that goes on with it.
    for later in (with_commits(config, run), with_commits(config, run, starts=True)):
        assert later.data == started.data
        assert build_tokenizer(later).chat("hello") == [5, 8]
    assert build_tokenizer(with_commits(config)).chat("hello") == [5, 9]
    given = override(config, {"data.chat_template_time": "2025-01-01"})
    assert with_commits(given, run) == given
    recorded = json.loads((run / "config.json").read_text())
    del recorded["data"]["chat_template_time"]  # as in a run of an earlier version
    (run / "config.json").write_text(json.dumps(recorded))
    assert with_commits(config, run).data.chat_template_time is None
    assert with_commits(config, run, starts=True).data.chat_template_time == "2027-01-01T00:00:00"


def test_row_32_two_tokenizers_of_one_template_have_times_of_their_own(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=DATED)
    old, new = (
        tokenizer_of(directory, data__chat_template_time=time) for time in ("2026-01-02T03:04:05", "2027-01-01")
    )
    assert [old.chat("hello"), new.chat("hello"), old.chat("hello")] == [[5, 8], [5, 9], [5, 8]]
    for time in ("yesterday", ""):
        with refuses(f"data.chat_template_time = {time}: ...2026-11-28T09:30:00"):
            tokenizer_of(directory, data__chat_template_time=time)


CALLING = (
    "{% for m in messages %}<user> {{ m.content or '' }} "
    "{% for call in m.tool_calls or [] %}box {{ call.function.name }} "
    "{{ '?' if call.function.arguments.x == 1.5 }} {% endfor %}{% endfor %}<bot>"
)
CALL = {"type": "function", "function": {"name": "it", "arguments": {"x": 1.5}}}
ASKED = {"role": "user", "content": "hello"}


def read(directory: Path, *messages: object) -> Problem:
    path = directory / "problems.jsonl"
    path.write_text(json.dumps({"q": messages, "a": "1"}))
    return read_problems(path, "q", "a")[0]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "<user> box it ?"),
        ({"role": "assistant", "tool_calls": [CALL], "name": None, "refusal": []}, "<user> box it ?"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, "<user> box it ? box it ?"),
        ({"role": "assistant", "content": [{"type": "text", "text": "wor"}, "ld"]}, "<user> world"),
        ({"role": "tool", "content": [{"type": "text", "text": "world", "image": None}]}, "<user> world"),
    ],
)
def test_row_40_messages_reach_the_template_as_they_are(
    directory: Path, message: dict[str, object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(directory / "tokenizer_config.json", chat_template=CALLING)
    problem = read(directory, ASKED, message, ASKED)
    tokenizer = tokenizer_of(directory, data__instruction="{prompt} world")
    assert " ".join(WORDS[i] for i in tokenizer.chat(problem.prompt)) == f"<user> hello {text} <user> hello world <bot>"
    (directory / "again.jsonl").write_text(json.dumps({"q": prompt_fields(problem.prompt), "a": "1"}))
    assert read_problems(directory / "again.jsonl", "q", "a") == [problem]
    assert problem.question != read(directory, ASKED, {"role": "assistant", "content": "?"}, ASKED).question
    assert not caplog.records


def test_row_40_a_result_of_a_tool_may_come_last(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=CALLING)
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    problem = read(directory, ASKED, call, {"role": "tool", "content": "world", "tool_call_id": "1"})
    tokenizer = tokenizer_of(directory, data__instruction="{prompt} box")
    assert " ".join(WORDS[i] for i in tokenizer.chat(problem.prompt)) == (
        "<user> hello box <user> box it ? <user> world <bot>"
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "content": None, "tool_calls": []}, "field 'content'"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"b": 1}}]}, "'cache_control'"),
        ({"role": "user", "content": [{"type": "text"}]}, "'text'"),
        ({"role": "user", "content": [1]}, "'text'"),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "field 'content'"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"x": float("nan")}]}, "'tool_calls'"),
        ({"role": "assistant", "content": "x", "name": "a\ud83d"}, "'name'"),
    ],
)
def test_row_40_what_a_template_cannot_get_is_refused_by_name(
    directory: Path, message: dict[str, object], named: str
) -> None:
    with refuses(f"/...problems.jsonl:1: ...{named}", ConfigError):
        read(directory, message, ASKED, message)


def test_row_40_fields_that_the_template_does_not_read_are_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(directory)
    for _ in range(2):
        tokenizer.chat(read(directory, ASKED | {"weight": 0, "think": 1}).prompt)
    (record,) = caplog.records
    assert_refused(record.getMessage(), f"model.path = {directory}: ...think, weight")
    with refuses(f"model.path = {directory}: ...tool_calls", ConfigError):
        tokenizer.chat(read(directory, ASKED, {"role": "assistant", "tool_calls": [CALL]}, ASKED).prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_row_47_a_template_that_never_ends_is_one_line(
    directory: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.2)
    tokenizer = tokenizer_of(directory)
    before = signal.getsignal(signal.SIGVTALRM)
    tokenizer.chat("hello")
    change(directory / "tokenizer_config.json", chat_template=template)
    with refuses(f"model.path = {directory}: ...0.2 s", ConfigError):
        tokenizer_of(directory).chat("hello")
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_row_47_a_pattern_that_the_library_gives_up_is_one_line(tmp_path: Path) -> None:
    """A panic of its Rust is a BaseException."""
    write_word_tokenizer(tmp_path)
    pattern = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "it"}
    change(tmp_path / "tokenizer.json", normalizer=pattern)
    tokenizer = tokenizer_of(tmp_path)
    for ask in (tokenizer.encode, tokenizer.chat):
        with refuses(f"model.path = {tmp_path}: its tokenizer fails: Onig: ...", ConfigError):
            ask(60 * "x")


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "tok.Tok"]}, {"AutoTokenizer": ["a/b--tok.Tok", None]}])
def test_row_45_code_of_a_model_is_never_run_nor_asked_for(
    directory: Path, auto_map: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks on stdin"))
    (directory / "tok.py").write_text(f"open({str(directory / 'ran')!r}, 'w')")
    # Code of a model is not needed for its tokenizer.
    (directory / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "tok.Config"}, "eos_token_id": EOS})
    )
    assert tokenizer_of(directory).encode("hello") == [5]
    change(directory / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Tok")
    with refuses(f"model.path = {directory}: ...code of its own...never run", ConfigError):
        tokenizer_of(directory)
    assert not (directory / "ran").exists()
