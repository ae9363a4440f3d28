"""Lookup of the last tokens of a text in known texts, for drafters that propose the tokens that followed there.

A text stores a token as its id + 1, and 0 where there is no token, as after its end. So zeros are an empty text, caches
can be resized by padding with zeros, and a search never matches padding.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.drafters.base import Proposal
from specjax.options import at_least, at_most
from specjax.types import Prompts, TextCache

# Tokens of a match. A search takes one pass over the text for each.
MatchLength = Annotated[int, at_least(1), at_most(128)]


class Text(NamedTuple):
    """Text of a row, prompt and pending token included. length: int32 [B], the position of the next token."""

    cache: TextCache
    length: Int[Array, "B"]


class Found(NamedTuple):
    """Longest match of each row, and the tokens that followed it.

    matched: int32 [B], number of tokens that match; 0 without a match.
    tokens:  int32 [B, K], the tokens after the match.
    known:   int32 [B], 0 .. K, number of these that the text holds.
    """

    matched: Int[Array, "B"]
    tokens: Int[Array, "B K"]
    known: Int[Array, "B"]


def encode(tokens: Int[Array, "*rows"], counts: Bool[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Return tokens as a text stores them: id + 1, or 0 where they do not count."""
    return jnp.where(counts, tokens + 1, 0)


def prompt_text(prompts: Prompts) -> Text:
    """Return the texts of the prompts, one position longer than the policy's cache: for the pending token."""
    column = jnp.arange(prompts.tokens.shape[1])[None]
    text = encode(prompts.tokens, column < prompts.lengths[:, None])
    return Text(TextCache(jnp.pad(text, ((0, 0), (0, 1)))), prompts.lengths)


def with_tokens(text: Text, tokens: Int[Array, "B T"], emitted: Int[Array, "B"]) -> Text:
    """Return the text with the first `emitted` of these tokens appended. The cache must have room for all T."""
    new = encode(tokens, jnp.arange(tokens.shape[1])[None] < emitted[:, None])
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    return Text(TextCache(put(text.cache.tokens, new, text.length)), text.length + emitted)


def with_completion(text: Text, visible: Int[Array, "B"], tokens: Int[Array, "B S"], emitted: Int[Array, "B"]) -> Text:
    """Return the prompt that the text holds followed by the whole completion. Arguments as for `Drafter.catch_up`."""
    place = jnp.arange(text.cache.tokens.shape[1])[None] - (visible + 1 - emitted)[:, None]
    completion = jnp.take_along_axis(tokens, jnp.clip(place, 0, tokens.shape[1] - 1), axis=1)
    known = jnp.where(place < 0, text.cache.tokens, encode(completion, place < emitted[:, None]))
    return Text(TextCache(known), visible + 1)


def last_tokens(text: Text, count: int) -> Int[Array, "B n"]:
    """Return the last `count` tokens of each row as a text stores them; 0 before the first token."""
    padded = jnp.pad(text.cache.tokens, ((0, 0), (count, 0)))
    return jnp.take_along_axis(padded, text.length[:, None] + jnp.arange(count)[None], axis=1)


def look_up(texts: Int[Array, "B M S"], end: Int[Array, "B n"], min_n: int, count: int) -> Found:
    """Return what followed the longest match of the last min_n .. n tokens of `end` in the M texts of each row.

    Ties go to the first text, and within it to the last match. A match that nothing follows, such as the end of the
    row's own text, does not count. Takes one pass over all places for each n.
    """
    size, longest = texts.shape[2], end.shape[1]
    padded = jnp.pad(texts, ((0, 0), (0, 0), (longest - 1, 0)))
    alive = texts[:, :, 1:] > 0
    run = jnp.zeros(alive.shape, jnp.int32)
    for n in range(longest):
        token = end[:, longest - 1 - n, None, None]
        alive = alive & (token > 0) & (padded[:, :, longest - 1 - n :][:, :, : size - 1] == token)
        run = run + alive.astype(jnp.int32)
    best = jnp.max(run * size + jnp.arange(size - 1)[None, None], axis=2)
    source = jnp.argmax(best // size, axis=1)
    best = jnp.take_along_axis(best, source[:, None], axis=1)
    text = jnp.take_along_axis(texts, source[:, None, None], axis=1)[:, 0]
    following = best % size + 1 + jnp.arange(count)[None]
    tokens = jnp.take_along_axis(jnp.pad(text, ((0, 0), (0, count))), following, axis=1)
    matched = best[:, 0] // size
    matched = jnp.where(matched >= min_n, matched, 0)
    known = jnp.sum(jnp.cumprod(tokens > 0, axis=1), axis=1, dtype=jnp.int32)
    return Found(matched, jnp.maximum(tokens - 1, 0), jnp.where(matched > 0, known, 0))


def longer_match(one: Found, other: Found) -> Found:
    """Return for each row the longer match; the first if both are as long."""
    use = other.matched > one.matched
    return Found(*(jnp.where(use if x.ndim == 1 else use[:, None], y, x) for x, y in zip(one, other, strict=True)))


def one_hot_proposal(tokens: Int[Array, "B K"], length: Int[Array, "B"], vocab_size: int) -> Proposal:
    """Return the proposal of a deterministic drafter: its law is one-hot."""
    log_q = jnp.where(tokens[..., None] == jnp.arange(vocab_size)[None, None], 0.0, -jnp.inf)
    return Proposal(tokens, log_q, length)


def check_lengths(min_n: int, max_n: int) -> None:
    """Raise ValueError unless min_n <= max_n."""
    if min_n > max_n:
        raise ValueError(f"min_n = {min_n}: must be at most max_n = {max_n}")
