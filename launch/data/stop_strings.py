"""Stop strings and the text of a tokenizer's tokens."""

import random
import re
from collections.abc import Iterable, Sequence

from launch.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from launch.errors import ConfigError
from specjax.options import show
from specjax.rollout.stop_strings import StopStrings, Vocabulary, automaton_of, check_stop_strings

# A byte in vocabularies that otherwise hold text.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Characters that stand for themselves in byte-level vocabularies. The other bytes are the characters from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + at): byte for at, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def find_stop_strings(texts: Iterable[str], tokenizer: Tokenizer) -> StopStrings:
    """Return the stop strings with the automaton that finds them in the tokenizer's tokens.

    Raises ConfigError for a text that tokens cannot write, and if the tokenizer changes text where tokens meet.
    """
    texts = tuple(texts)
    if not texts:
        return StopStrings()
    try:
        check_stop_strings(texts)
    except ValueError as error:
        raise ConfigError(f"rollout.{error}; rollout.replace_stop_tokens = True drops the model's") from error
    vocabulary = vocabulary_of(tokenizer)
    for text in texts:
        automaton = automaton_of(StopStrings((text,), vocabulary))
        if automaton is None or not automaton.finds_any():
            raise ConfigError(
                f"rollout.stop_strings = {show(text)!r}: no tokens of the tokenizer have this text; must be text that "
                "a completion can hold"
            )
    return StopStrings(texts, vocabulary)


def until_stop(ids: list[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a completion up to the first that ends it, with it, and the ids after it."""
    end = next((index + 1 for index, token in enumerate(ids) if token in tokenizer.stop_tokens), len(ids))
    automaton = automaton_of(tokenizer.stop_strings)
    found = None if automaton is None else automaton.end(ids[:end])
    end = end if found is None else found
    return ids[:end], ids[end:]


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return what each token adds to decoded text.

    Raises ConfigError if the text of several tokens is not that of each, joined.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return Vocabulary([b"" if token in tokenizer.stop_tokens else bytes([token]) for token in range(256)])
    ids = range(tokenizer.vocab_size)
    first = [tokenizer.decode([token]) for token in ids]
    # A token before the others: some tokenizers drop a space at the start of a text.
    before = next((token for token in ids if first[token].isascii() and first[token].isalnum()), 0)
    later = [tokenizer.decode([before, token]).removeprefix(first[before]) for token in ids]
    pieces = [tokenizer.piece(token) if isinstance(tokenizer, HuggingFaceTokenizer) else "" for token in ids]
    fallback = {
        token for token in ids if _BYTE.fullmatch(pieces[token]) and later[token] and pieces[token] not in later[token]
    }
    _check_joins(tokenizer, before, first, later, fallback)

    def encoded(texts: Sequence[str]) -> list[bytes]:
        return [
            _bytes_of(pieces[token], text) if text and token in fallback or _UNKNOWN in text else text.encode()
            for token, text in enumerate(texts)
        ]

    return Vocabulary(encoded(later), encoded(first), fallback)


def _bytes_of(piece: str, text: str) -> bytes:
    """Return the bytes of a token, whose text may be no whole characters."""
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    mapped = bytes(_BYTES.get(character, 0) for character in piece)
    for found in (mapped, piece.encode()):
        if found.decode(errors="replace") == text:
            return found
    raise ConfigError(f"rollout.stop_strings: the bytes of token {piece!r} are unknown; must be empty")


def _check_joins(
    tokenizer: Tokenizer, before: int, first: Sequence[str], later: Sequence[str], fallback: set[int]
) -> None:
    """Raise ConfigError if tokens have other text together than one after the other."""
    whole = [token for token, text in enumerate(later) if _UNKNOWN not in text and token not in fallback]
    random.Random(0).shuffle(whole)
    # Starts of a text, repetitions, and all tokens in one text.
    starts = [token for token in whole if first[token] != later[token]]
    rows = [[token, token] for token in (*starts[:99], *whole[:99])] + [[before, *whole]]
    if any(tokenizer.decode(row) != first[row[0]] + "".join(later[token] for token in row[1:]) for row in rows):
        raise ConfigError(
            "rollout.stop_strings: the tokenizer changes text where tokens meet, so that it is not known which of them "
            "ends a completion; must be empty"
        )
