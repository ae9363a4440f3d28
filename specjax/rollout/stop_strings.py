"""Texts that end a completion, found in its tokens by a finite automaton within the compiled rollout.

The automaton reads bytes of UTF-8, so that a text may begin and end inside a token. Its state is a function of a
completion's tokens, and tells what of a text they end with.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.options import show

# States of the automaton: before any text, and after a stop string.
START, FOUND = 0, 1
# Most bytes of UTF-8 of one stop string, and of all. Each is a state, with a transition for each token.
MOST_BYTES, MOST_BYTES_IN_ALL = 128, 1024
# Most tokens that are read without a loop.
UNROLLED = 16


class Vocabulary(NamedTuple):
    """Text of each token within a completion, by id.

    Attributes:
        texts:     UTF-8, which may begin and end inside a character. Empty for tokens that decoding cuts.
        first:     the same at the start of a text, where some tokenizers drop a space. None: `texts`.
        fallback:  ids of single bytes that are decoded together with their neighbours of this kind: if these are not
                   valid UTF-8, all of them become U+FFFD.
    """

    texts: Sequence[bytes]
    first: Sequence[bytes] | None = None
    fallback: Collection[int] = ()


@dataclass(frozen=True, eq=False)
class StopAutomaton:
    """Automaton over tokens. Tokens of the same kind have the same transitions.

    Attributes:
        kinds:     int32 [V + 1], the kind of each token; last of all ids beyond the vocabulary.
        following: int32 [kinds, states], the state after a token. After FOUND the search starts again.
    """

    kinds: np.ndarray
    following: np.ndarray

    def advance(self, state: Int[Array, "B"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Return the state after each token: FOUND where one completes a stop string."""
        following = jnp.asarray(self.following)

        def read(state: Array, kind: Array) -> tuple[Array, Array]:
            state = following[kind, state]
            return state, state

        kinds = jnp.asarray(self.kinds)[jnp.minimum(tokens, len(self.kinds) - 1)]
        return jax.lax.scan(read, state, kinds.T, unroll=tokens.shape[1] <= UNROLLED)[1].T

    def after(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the state after completions of so many tokens."""
        states = self.advance(jnp.full_like(lengths, START), tokens)
        last = jnp.take_along_axis(states, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(lengths > 0, last, START)

    def end(self, tokens: Iterable[int]) -> int | None:
        """Return how many of the tokens it takes to complete a stop string; None if they hold none."""
        state = START
        for count, token in enumerate(tokens, start=1):
            state = self.following[self.kinds[min(token, len(self.kinds) - 1)], state]
            if state == FOUND:
                return count
        return None

    def finds_any(self) -> bool:
        """Return whether any tokens complete a stop string."""
        reached, before = np.arange(self.following.shape[1]) == START, -1
        while (count := np.sum(reached)) > before:
            reached[self.following[:, reached]] = True
            before = count
        return bool(reached[FOUND])


class StopStrings(tuple[str, ...]):
    """Stop strings, with the automaton that finds them in tokens of a vocabulary. Options hold them as text."""

    automaton: StopAutomaton | None

    def __new__(cls, texts: Iterable[str] = (), vocabulary: Vocabulary | None = None) -> "StopStrings":
        """Return the texts, checked by `check_stop_strings`. Without a vocabulary they have no automaton."""
        found = super().__new__(cls, texts)
        check_stop_strings(found)
        found.automaton = None
        if found and vocabulary is not None:
            found.automaton = _build([text.encode() for text in found], vocabulary)
        return found


def automaton_of(texts: tuple[str, ...]) -> StopAutomaton | None:
    """Return the automaton of stop strings; None without any. Raises ValueError for plain text."""
    if not texts:
        return None
    if not isinstance(texts, StopStrings) or texts.automaton is None:
        raise ValueError(f"stop_strings = {texts}: must be StopStrings with the vocabulary of the tokens")
    return texts.automaton


def check_stop_strings(texts: tuple[str, ...]) -> None:
    """Raise ValueError for texts that are empty, listed twice or too long, or that decoding may not keep."""
    if "" in texts or len(set(texts)) < len(texts):
        raise ValueError(f"stop_strings = {show(texts)}: must be texts of at least one character, each listed once")
    for text in texts:
        if "\N{REPLACEMENT CHARACTER}" in text or text.encode(errors="replace").decode() != text:
            raise ValueError(f"stop_strings = {show(ascii(text))}: must be Unicode text without U+FFFD")
    lengths = [len(text.encode()) for text in texts]
    if max(lengths, default=0) > MOST_BYTES or sum(lengths) > MOST_BYTES_IN_ALL:
        raise ValueError(
            f"stop_strings = {show(texts)}: must be at most {MOST_BYTES} bytes of UTF-8 each and {MOST_BYTES_IN_ALL} "
            "in all"
        )


class _State(NamedTuple):
    """State of the automaton over bytes.

    matched:   the longest end of the text so far that a stop string begins with; None after a stop string.
    character: in a run of bytes of the fallback, what the last character still needs (`_next_in_character`): None if
               the run is not valid UTF-8.
    """

    matched: bytes | None
    character: tuple[int, int, int] | None


_Matches = dict[bytes, dict[int, bytes | None]]

# Between characters: no byte is missing.
_WHOLE = (0, 0x80, 0xBF)
_ROOT = _State(b"", _WHOLE)


def _build(stops: Sequence[bytes], vocabulary: Vocabulary) -> StopAutomaton:
    """Return the automaton over tokens."""
    # The last token stands for ids beyond the vocabulary.
    texts = [*vocabulary.texts, b""]
    first = texts if vocabulary.first is None else [*vocabulary.first, b""]
    steps, root = _byte_steps(stops, vocabulary)
    table = _states_after(np.arange(len(steps)), texts, vocabulary.fallback, steps)
    from_start = _states_after(np.array([root]), first, vocabulary.fallback, steps)[:, 0]
    # Tokens without text leave the start as it is: what follows them is still the first text.
    table[:, START] = table[:, FOUND] = np.where(list(map(bool, texts)), from_start, START)
    numbers: dict[bytes, int] = {}
    kinds = [numbers.setdefault(row.tobytes(), len(numbers)) for row in table]
    following = np.frombuffer(b"".join(numbers), np.int32).reshape(len(numbers), -1)
    return StopAutomaton(np.array(kinds, np.int32), following)


def _byte_steps(stops: Sequence[bytes], vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
    """Return the state after each byte, int32 [states, 512], and the number of the state at which a text starts.

    Columns 256 and above are bytes of the fallback. FOUND stays: a token may go on after a stop string.
    """
    symbols = {byte for text in (*vocabulary.texts, *(vocabulary.first or ())) for byte in text}
    symbols |= {256 + vocabulary.texts[token][0] for token in vocabulary.fallback}
    # START is left only by whole tokens.
    numbers: dict[_State | None, int] = {None: START, _State(None, _WHOLE): FOUND, _ROOT: FOUND + 1}
    rows, waiting = {START: {}, FOUND: {}}, [_ROOT]
    matches = _matches(stops, {symbol % 256 for symbol in symbols})
    while waiting:
        state = waiting.pop()
        row = rows[numbers[state]] = {}
        for symbol in symbols:
            after = _next_state(state, symbol, matches)
            if after not in numbers:
                numbers[after] = len(numbers)
                waiting.append(after)
            row[symbol] = numbers[after]
    steps = np.tile(np.arange(len(numbers), dtype=np.int32)[:, None], 512)
    for number, row in rows.items():
        steps[number, list(row)] = list(row.values())
    return steps, numbers[_ROOT]


def _matches(stops: Collection[bytes], alphabet: Collection[int]) -> _Matches:
    """Return `_State.matched` after each byte, by that before it (Aho and Corasick, 1975)."""
    prefixes = {stop[:count] for stop in stops for count in range(len(stop))}
    rows: _Matches = {}
    # By length. Where no stop string goes on, the next shorter match decides; None: there is none.
    queue: list[tuple[bytes, bytes | None]] = [(b"", None)]
    for matched, shorter_match in queue:
        others = dict.fromkeys(alphabet, b"") if shorter_match is None else rows[shorter_match]
        row = rows[matched] = dict(others)
        for byte, shorter in others.items():
            longer = matched + bytes([byte])
            if longer in stops:
                row[byte] = None
            elif longer in prefixes and shorter is not None:
                row[byte] = longer
                queue.append((longer, shorter))
    return rows


def _next_state(state: _State, symbol: int, matches: _Matches) -> _State:
    """Return the state after a byte. symbol: the byte, and 256 more if it is one of the fallback."""
    in_fallback, byte = divmod(symbol, 256)
    character = _WHOLE
    # What a run of the fallback has left incomplete becomes U+FFFD, which no stop string holds.
    matched = state.matched if state.character == _WHOLE else b""
    if in_fallback:
        character = _next_in_character(state.character, byte)
        if character is None:
            return _State(b"", None)
        matched = state.matched
    assert matched is not None
    matched = matches[matched][byte]
    return _State(matched, _WHOLE if matched is None else character)


def _next_in_character(character: tuple[int, int, int] | None, byte: int) -> tuple[int, int, int] | None:
    """Return what a character of UTF-8 needs after a byte: (bytes, least of the next, most of it); None if invalid."""
    if character is None:
        return None
    missing, least, most = character
    if missing:
        return (missing - 1, 0x80, 0xBF) if least <= byte <= most else None
    if byte < 0x80:
        return _WHOLE
    if 0xC2 <= byte <= 0xDF:
        return 1, 0x80, 0xBF
    if 0xE0 <= byte <= 0xEF:
        return 2, 0xA0 if byte == 0xE0 else 0x80, 0x9F if byte == 0xED else 0xBF
    if 0xF0 <= byte <= 0xF4:
        return 3, 0x90 if byte == 0xF0 else 0x80, 0x8F if byte == 0xF4 else 0xBF
    return None


def _states_after(
    starts: np.ndarray, texts: Sequence[bytes], fallback: Collection[int], steps: np.ndarray
) -> np.ndarray:
    """Return the state after each text from each of the starts, int32 [texts, starts]."""
    lengths = np.array([len(text) for text in texts])
    symbols = np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)
    symbols += 256 * np.repeat(np.isin(np.arange(len(texts)), list(fallback)), lengths)
    begins, longest_first = np.cumsum(lengths) - lengths, np.argsort(-lengths, kind="stable")
    states = np.tile(starts.astype(np.int32), (len(texts), 1))
    for place in range(lengths.max()):
        longer = longest_first[: np.sum(lengths > place)]
        states[longer] = steps[states[longer], symbols[begins[longer] + place, None]]
    return states
