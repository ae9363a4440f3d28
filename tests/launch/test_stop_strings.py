"""Stop strings: found in tokens exactly where they stand in decoded text."""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.data.stop_strings import find_stop_strings, until_stop, vocabulary_of
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from launch.errors import ConfigError
from launch.rewards.answers import before_stop
from specjax.rollout.stop_strings import FOUND, StopStrings, automaton_of
from tests.launch.tokenizer_files import change, write_word_tokenizer
from tests.refusals import refuses

# Texts with characters of one to four bytes, some of which share bytes.
TEXTS = ("a", "b", "ab", "</", "ans", ">", "<", "\n", "\n\n", " ", " a", "  ", "é", "世", "ba b", "?", "è", "界", "😀")
Pieces = tuple[list[str], object]


def _write(directory: Path, vocabulary: list[str], decoder: object) -> None:
    """Write a tokenizer of these pieces, special tokens and an added one. Nothing is encoded with it."""
    model = {"type": "BPE", "vocab": {piece: number for number, piece in enumerate(vocabulary)}, "merges": []}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    texts = {"<eos>": True, "<s>": True, "<tag> é": False}
    added = [
        {"id": len(vocabulary) + at, "content": text, "special": special} | flags
        for at, (text, special) in enumerate(texts.items())
    ]
    contents = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    change(directory / "tokenizer_config.json", chat_template=None)


def _byte_level() -> Pieces:
    """Return pieces in the alphabet of byte-level vocabularies, some of them parts of characters."""
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = ["".join(piece for piece, _ in alphabet.pre_tokenize_str(text)) for text in TEXTS]
    parts = [piece[at:] for piece in whole for at in range(len(piece))]
    parts += [piece[:at] for piece in whole for at in range(1, len(piece))]
    pieces = dict.fromkeys([*whole, *parts, *sorted(alphabet.alphabet())])
    return [*pieces], {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def _fallback(strips: bool) -> Pieces:
    """Return pieces of text and bytes, as SentencePiece has them. strips: as in Llama 2, unlike in Gemma."""
    steps: list[object] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * strips
    pieces = [text.replace(" ", "▁") for text in TEXTS[:-2]] + [f"<0x{byte:02X}>" for byte in range(256)]
    return pieces, {"type": "Sequence", "decoders": steps}


def _metaspace() -> Pieces:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return [text.replace(" ", "▁") for text in TEXTS], decoder


def _pieces(directory: Path, kind: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharacterTokenizer("ab<>/\n éè世")
    write_word_tokenizer(directory)
    if kind != "words":
        made = {"byte level": _byte_level(), "llama": _fallback(True), "gemma": _fallback(False)}
        _write(directory, *(made | {"metaspace": _metaspace()})[kind])
    return HuggingFaceTokenizer(directory)


KINDS = ["bytes", "characters", "words", "byte level", "llama", "gemma", "metaspace"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_ends_at_the_first_token_after_which_its_text_has_a_stop_string(tmp_path: Path, kind: str) -> None:
    tokenizer, draw = _pieces(tmp_path, kind), random.Random(0)
    vocabulary, size = vocabulary_of(tokenizer), tokenizer.vocab_size
    # Bytes of one character, and one that is a character, where such bytes are decoded together.
    single = [token for token in vocabulary.fallback if vocabulary.texts[token] in (b"\xc3", b"\xa9", b"A")]
    found = inside = cut = 0
    for _ in range(25):
        # Few tokens, so that stop strings occur, among them ids beyond the vocabulary.
        tokens = [*draw.choices(range(min(size, 16)), k=4), *draw.sample(range(size), 2), *single, size + 3]
        texts = [tokenizer.decode(draw.choices(tokens, k=4)) for _ in range(3)]
        parts = [text[at : at + draw.randint(1, 5)] for text in texts for at in (draw.randrange(len(text) + 1),)]
        stops = tuple(dict.fromkeys(part for part in parts if part and "\ufffd" not in part))
        automaton = automaton_of(StopStrings(stops, vocabulary))
        for _ in range(40 if stops else 0):
            assert automaton is not None
            ids = draw.choices(tokens, k=12)
            until = [count for count in range(1, 13) if any(stop in tokenizer.decode(ids[:count]) for stop in stops)]
            assert automaton.end(ids) == (until[0] if until else None), (stops, ids)
            found += bool(until)
            inside += bool(until) and not tokenizer.decode(ids[: until[0]]).endswith(stops)
            cut += bool(until) and not all(map(tokenizer.decode, ([token] for token in ids[: until[0]])))
    assert found > 100
    assert cut or kind == "metaspace"
    assert inside or kind in ("bytes", "characters")


def test_the_compiled_automaton_is_the_one_of_the_host() -> None:
    vocabulary = vocabulary_of(CharacterTokenizer("ab"))
    automaton = automaton_of(StopStrings(("abab", "bb"), vocabulary))
    assert automaton is not None
    rows = np.random.default_rng(0).integers(4, size=(50, 20))
    states = np.asarray(jax.jit(automaton.advance)(jnp.zeros(50, jnp.int32), jnp.asarray(rows, jnp.int32)))
    ends = [automaton.end(row) for row in rows.tolist()]
    assert [int(np.argmax(row == FOUND)) + 1 if (row == FOUND).any() else None for row in states] == ends
    lengths = jnp.asarray([end or 0 for end in ends], jnp.int32)
    after = np.asarray(automaton.after(jnp.asarray(rows, jnp.int32), lengths))
    np.testing.assert_array_equal(after == FOUND, [end is not None for end in ends])


def test_texts_that_cannot_end_a_completion_are_refused(tmp_path: Path) -> None:
    characters, words = CharacterTokenizer("ab"), _pieces(tmp_path, "words")
    assert find_stop_strings((), characters) == ()
    for texts, tokenizer, missed in ((("ab", "ac"), characters, "ac"), (("o  w",), words, "o  w")):
        with refuses(f"rollout.stop_strings = {missed!r}: ...", ConfigError):
            find_stop_strings(texts, tokenizer)
    assert find_stop_strings(("o w",), words).automaton is not None
    many = tuple(f"{number:0128}" for number in range(8))
    assert StopStrings(many) == many
    refused = [(("",), "('',)"), (("a", "a"), "..."), (("\ud800",), "..."), (("a\ufffd",), "'a\\ufffd'")]
    for texts, named in (*refused, (("é" * 65,), "..."), ((*many, "a"), "...")):
        with refuses(f"stop_strings = {named}...must be"):
            StopStrings(texts)
    # What decoding changes where tokens meet is not known token by token.
    for vocabulary, decoder in (
        (["a</w>", "c", "b</w>"], {"type": "BPEDecoder", "suffix": "</w>"}),
        (["a", "b"], {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}),
    ):
        _write(tmp_path, vocabulary, decoder)
        with refuses("rollout.stop_strings: ...changes text where tokens meet", ConfigError):
            find_stop_strings(("ab",), HuggingFaceTokenizer(tmp_path))


def test_text_alone_has_no_automaton() -> None:
    assert automaton_of(()) is None
    for texts in (("a",), StopStrings(("a",))):
        with refuses("stop_strings = ('a',): ...StopStrings"):
            automaton_of(texts)


def test_an_answer_ends_at_its_first_stop() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.stop_strings = find_stop_strings(("</a>", "\n\n"), tokenizer)
    for text, kept in (("1</a>2", "1</a>"), ("1\n\n</a>", "1\n\n"), ("12", "12\0")):
        ids = [*tokenizer.encode(text), 256]
        answer, after = until_stop(ids, tokenizer)
        assert answer == [256 if token == 0 else token for token in kept.encode()] and answer + after == ids
    assert until_stop([49, 256, *b"</a>"], tokenizer) == ([49, 256], [*b"</a>"])
    assert before_stop("1\n\n</a>", ("</a>", "\n\n")) == "1" and before_stop("1<", ("</a>",)) == "1<"
