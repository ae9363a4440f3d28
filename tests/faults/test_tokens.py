"""Faults between text and tokens: stop tokens, special tokens, and tokenizers that fail or bring code."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.data.answer_files import load_answers
from launch.data.problems import Problem
from launch.data.responses import worked_solutions
from launch.data.tokenizer_files import state_stops
from launch.data.tokenizers import Tokenizer, token_texts
from launch.errors import ConfigError
from launch.rewards.reward_fn import traced_exact
from launch.setup.experiment import build_experiment
from launch.setup.problems import build_tokenizer
from specjax.types import Prompts, Rollout
from tests.launch.programs import SMALLEST
from tests.launch.tokenizer_files import change, write_word_tokenizer
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
