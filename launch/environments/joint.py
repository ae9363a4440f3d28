"""Token ids between two turns: the end of a turn, what the environment answers, and the start of the next turn."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from launch.environments.answers import TextMessage
from launch.environments.append_only import CALL_ID, Base, find_base
from launch.errors import ConfigError, first_line
from specjax.options import show

# First character of a plane for private use. While an answer is rendered, a control token in it is one character.
_MASK = 0x100000
_PRIVATE = re.compile(f"[{chr(_MASK)}-{chr(0x10FFFF)}]")
_CALL_ID = re.compile("[a-zA-Z0-9]{9}")


class Joint:
    """Ids that follow a sampled turn, so that the context goes on as the chat template writes it.

    The sampled ids stay as they are, and nothing is tokenized together with them. Without a chat template, an answer is
    the text of its messages, joined by nothing.

    A control token's text in an answer, such as "<|im_end|>", becomes ordinary tokens: its first character and the rest
    are tokenized apart. Markers that a template writes as ordinary text cannot be told from an answer's.

    Args:
        tokenizer: with its final stop tokens.
        schemas:   of the tools, as `tool_schemas` returns them.
        limit:     most ids of an answer, those of the template included.
        roles:     of the messages that the environment answers with: "tool", "user".

    Raises ConfigError if the template is not append-only for these roles, or if the limit leaves no room for an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: Sequence[dict[str, Any]] = (),
        *,
        limit: int,
        roles: Sequence[str] = ("tool",),
    ) -> None:
        self._tokenizer, self._schemas, self._limit, self._roles = tokenizer, schemas, limit, tuple(roles)
        self._bases, self._control, self._pattern = dict[str, Base](), list[str](), re.compile("(?!)")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            if tokenizer.template is not None:
                self._bases = {role: find_base(tokenizer, schemas, role) for role in roles}
            frames = [self._after(base, [self._message(role, "")]) for role, base in self._bases.items()]
            self._control = sorted(tokenizer.control_tokens("".join(frames)), key=len, reverse=True)
        if self._control:
            self._pattern = re.compile("|".join(map(re.escape, self._control)))
        for role, base in self._bases.items():
            self._check(role, base)

    def ids(self, observation: str | Sequence[TextMessage], turn_ids: Sequence[int]) -> list[int]:
        """Return the ids that follow a turn, at most `limit`.

        They begin with the template's end token if the turn does not end with it. If they are too many, the contents of
        all messages are cut at one number of characters, and the last messages are left out if that is not enough.

        observation: text of the user, or messages.
        turn_ids:    sampled ids of the turn, with its stop token.

        Raises ConfigError for messages of other roles or without text, for messages that the template refuses or that
        change what it wrote before, and for text that the tokenizer cannot write.
        """
        given = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        messages, last = [self._masked(message) for message in given], int(turn_ids[-1]) if len(turn_ids) else None

        def cut(count: int, most: int) -> list[int]:
            return self._ids([each | {"content": each["content"][:most]} for each in messages[:count]], last)

        # A long answer is not tokenized whole.
        longest, most = max((len(message["content"]) for message in messages), default=0), self._limit
        while len(ids := cut(len(messages), most)) <= self._limit and most < longest:
            most *= 2
        if len(ids) <= self._limit:
            return ids
        count = _largest(lambda count: len(cut(count, 0)) <= self._limit, 1, len(messages))
        most = _largest(lambda most: len(cut(count, most)) <= self._limit, 0, most)
        ids = cut(count, most)
        if len(ids) > self._limit:
            raise ConfigError(f"observation = {show(messages)}: does not fit, even without content; must be shorter")
        return ids

    def _masked(self, message: TextMessage) -> dict[str, str]:
        """Return the texts of a message as the template gets them, with a character for each control token."""
        if message.get("role") not in self._roles or not isinstance(message.get("content"), str):
            raise ConfigError(
                f"observation = {show(message)}: must have text as content, and one of the roles "
                f"{', '.join(self._roles)}"
            )
        texts = {name: text for name, text in message.items() if isinstance(text, str)}
        masked = {name: self._pattern.sub(self._mask, _writable(text)) for name, text in texts.items()}
        if masked["role"] == "tool" and not _CALL_ID.fullmatch(masked.get("tool_call_id", "")):
            masked["tool_call_id"] = CALL_ID
        return masked

    def _message(self, role: str, content: str) -> dict[str, str]:
        return self._masked({"role": role, "content": content})

    def _mask(self, found: re.Match[str]) -> str:
        return chr(_MASK + self._control.index(found[0]))

    def _ids(self, messages: Sequence[Mapping[str, str]], last: int | None) -> list[int]:
        """Return the ids of masked messages after a turn with this last id."""
        if not self._bases:
            return self._encode("".join(message["content"] for message in messages))
        base = self._bases[messages[0]["role"] if messages else self._roles[0]]
        ids = self._encode(self._after(base, messages))
        return ids[1:] if last == base.end_id else ids

    def _after(self, base: Base, messages: Sequence[Mapping[str, str]]) -> str:
        """Return what the template writes from the end token of the turn before the messages on."""
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)
        try:
            text = self._tokenizer.chat_text([*base.messages, *messages], self._schemas, generation_prompt=True)
        except Exception as error:  # a template is a program, which may raise anything
            raise ConfigError(
                f"observation = {show(messages)}: the chat template fails: {first_line(error)}; must be messages that "
                "it writes"
            ) from error
        if not text.startswith(base.text + base.end):
            raise ConfigError(
                f"observation = {show(messages)}: the chat template changes the turns before it; must be messages "
                "after which it keeps them"
            )
        return text[len(base.text) :]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text with masks."""
        ids = list[int]()
        for part in re.split(f"([{chr(_MASK)}-{chr(_MASK + len(self._control))}])", text):
            at = ord(part) - _MASK if len(part) == 1 else -1
            parts = [self._control[at][:1], self._control[at][1:]] if 0 <= at < len(self._control) else [part]
            for each in filter(None, parts):
                ids += self._tokenizer.encode(each)
        return ids

    def _check(self, role: str, base: Base) -> None:
        """Raise ConfigError unless the ids are the ones of the template's text, and leave room for an answer."""
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)
        before, answer = self._tokenizer.encode(base.text + base.end), [self._message(role, "dummy-observation")]
        joined = before + self._ids(answer, base.end_id)
        if before[-1] != base.end_id or joined != self._tokenizer.encode(base.text + self._after(base, answer)):
            raise ConfigError(
                f"model.path = {self._tokenizer.directory}: its tokenizer joins {base.end!r}, which ends a turn, with "
                "the text beside it; must have it as a token of its own"
            )
        needed = len(self._ids([self._message(role, "")], None))
        if needed > self._limit:
            raise ConfigError(
                f"environment.answer_tokens = {self._limit}: the chat template takes {needed} for an empty "
                "answer; must be more"
            )


def _writable(text: str) -> str:
    """Return a text without halves of surrogate pairs, which have no bytes, and without masks."""
    return _PRIVATE.sub("\N{REPLACEMENT CHARACTER}", text.encode(errors="replace").decode())


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a number from low to high that fits, the largest if all smaller ones do; low if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
