"""Tokenizers: text to token ids and back."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from launch.data.chat_template import render, render_text
from launch.data.hub import checkpoint_directory
from launch.data.prompts import CALLS, Conversation, Message, Prompt, prompt_fields, tools_of
from launch.data.tokenizer_files import listed_stop_strings, listed_stop_tokens, load_tokenizer, refusing_panics
from launch.errors import ConfigError
from specjax.options import show

logger = logging.getLogger(__name__)

# Arguments of transformers' apply_chat_template that are not variables of the template.
_NO_VARIABLES = {
    *("conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer. Ids are below `vocab_size`; the policy's vocabulary may be larger."""

    @property
    def vocab_size(self) -> int: ...

    stop_tokens: tuple[int, ...]
    """Ids that end a completion. The first is appended to answers that models are trained on."""

    stop_strings: tuple[str, ...]
    """Texts that end a completion. `build_tokenizer` gives them the automaton that finds them in tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without added special tokens."""
        ...

    def token_ids(self) -> Collection[int]:
        """Return the ids that have a token, stop tokens included."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without ids outside the vocabulary, stop tokens and tokens that it cuts."""
        ...

    def with_special_tokens(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with all special tokens, for people to read."""
        ...

    def chat(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt in the model's chat format, up to the start of the answer.

        Raises ConfigError if the format does not support the messages.
        """
        ...


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: ids 0 .. 255, and stop token 256.

    instruction: as in `HuggingFaceTokenizer`.
    """

    vocab_size = 257

    def __init__(self, instruction: str = "{prompt}") -> None:
        self._instruction, self._warned = _checked(instruction), set[str]()
        self.stop_tokens: tuple[int, ...] = (256,)
        self.stop_strings: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_ids(self) -> Collection[int]:
        return range(self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256 and i not in self.stop_tokens).decode(errors="replace")

    with_special_tokens = decode  # there are none

    def chat(self, prompt: Prompt) -> list[int]:
        return self.encode(self._instruction.format(prompt=_only_text(prompt, self._warned)))


class CharacterTokenizer:
    """Tokenizer of the characters of `alphabet`: ids 0, 1, .. in this order, then one stop token.

    instruction: as in `HuggingFaceTokenizer`.
    """

    def __init__(self, alphabet: str, instruction: str = "{prompt}") -> None:
        self._alphabet, self._instruction, self._warned = alphabet, _checked(instruction), set[str]()
        self.vocab_size = len(alphabet) + 1
        self.stop_tokens: tuple[int, ...] = (len(alphabet),)
        self.stop_strings: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ConfigError for a character outside the alphabet."""
        for character in text:
            if character not in self._alphabet:
                raise ConfigError(f"text = {text!r}: holds {character!r}; allowed characters are {self._alphabet!r}")
        return [self._alphabet.index(character) for character in text]

    def token_ids(self) -> Collection[int]:
        return range(self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i] for i in ids if 0 <= i < len(self._alphabet) and i not in self.stop_tokens)

    with_special_tokens = decode  # there are none

    def chat(self, prompt: Prompt) -> list[int]:
        return self.encode(self._instruction.format(prompt=_only_text(prompt, self._warned)))


class HuggingFaceTokenizer:
    """Tokenizer of a Hugging Face checkpoint, with its chat template if it has one.

    The stop tokens are the tokenizer's end-of-sequence token and any in `generation_config.json` and `config.json`.
    There may be none. The stop strings are those in `generation_config.json`.

    Args:
        directory:       directory in Hugging Face layout, or a name on the hub.
        instruction:     format string that is applied to a prompt before the chat template. Example:
                         "{prompt}\\nPut the answer in \\\\boxed{{}}."
        system_prompt:   system message for prompts without one.
        template_kwargs: further variables of the chat template. Templates ignore unknown variables.
        keep_special_tokens: leave special tokens in decoded text. False: `decode` cuts them.
        template_time:   what strftime_now of the chat template takes for now. None: the time of this call.

    Raises ConfigError if transformers is not installed, if the directory is missing or holds no usable tokenizer, if
    the instruction is malformed, or if the chat template does not accept these options.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        instruction: str = "{prompt}",
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        template_time: datetime | None = None,
        keep_special_tokens: bool = False,
    ) -> None:
        local = checkpoint_directory("model.path", directory)
        self._tokenizer = load_tokenizer(local)
        self._instruction = _checked(instruction)
        self._system_prompt, self._template_kwargs = system_prompt, dict(template_kwargs or {})
        self._template_time = template_time or datetime.now()
        if self._tokenizer.chat_template is None:
            check_no_template(f"model.path = {directory}", system_prompt, self._template_kwargs)
        for name in self._template_kwargs.keys() & _NO_VARIABLES:
            raise ConfigError(f"data.chat_template_kwargs = {template_kwargs}: {name} is not a variable of a template")
        # Ids may have gaps, so there may be fewer tokens than the highest id suggests.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.directory, self._skips_special = directory, not keep_special_tokens
        self._warned, self._cut_beside = set[str](), dict[tuple[str, ...], set[int] | None]()
        self.stop_tokens: tuple[int, ...] = listed_stop_tokens(self._tokenizer, local)
        self.stop_strings = listed_stop_strings(local / "generation_config.json")
        # Of all prompts, before their own.
        self.tools: Sequence[dict[str, Any]] = ()

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({str(self.directory)!r}, vocab_size={self.vocab_size})"

    @property
    def template(self) -> str | None:
        """The chat template that prompts are rendered with; None without one."""
        given = self._template_kwargs.get("chat_template")
        has_none = given is None and self._tokenizer.chat_template is None
        return None if has_none else self._tokenizer.get_chat_template(given, self._template_kwargs.get("tools"))

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def token_ids(self) -> Collection[int]:
        return {*self._tokenizer.get_vocab().values(), *self.stop_tokens}

    def decode(self, ids: Sequence[int]) -> str:
        # Skip stop tokens here: the ones in generation_config.json may not be special tokens of the tokenizer.
        text_ids = [i for i in ids if 0 <= i < self.vocab_size and i not in self.stop_tokens]
        return self._decode(text_ids, skip_special=self._skips_special)

    def decode_keeping(self, ids: Sequence[int], markers: tuple[str, ...]) -> str:
        """Return the text of `ids` as `decode`, but with the special tokens that are in one of the markers."""
        if markers not in self._cut_beside:
            cut = set(self._cut_ids())
            texts = {i: self._tokenizer.convert_ids_to_tokens(i) or "" for i in cut - set(self.stop_tokens)}
            kept = {i for i, text in texts.items() if text and any(text in marker for marker in markers)}
            self._cut_beside[markers] = cut - kept if kept else None
        cut = self._cut_beside[markers]
        if cut is None:  # markers are ordinary text
            return self.decode(ids)
        return self._decode([i for i in ids if 0 <= i < self.vocab_size and i not in cut])

    def with_special_tokens(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with all special tokens, for people to read."""
        return self._decode(ids)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        with refusing_panics(self.directory):
            return self._tokenizer.encode(text, add_special_tokens=special)

    def _decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        with refusing_panics(self.directory):
            # Clean-up would take spaces away that the policy wrote.
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it; "" for an id without a token."""
        return self._tokenizer.convert_ids_to_tokens(token) or ""

    def cut_tokens(self) -> list[str]:
        """Return the tokens that are never in decoded text: stop tokens, and special tokens unless they are kept."""
        return sorted(text for text in self._tokenizer.convert_ids_to_tokens(self._cut_ids()) if text is not None)

    def _cut_ids(self) -> list[int]:
        """Return the ids that `decode` cuts. Stop tokens may be ids that only the policy's larger vocabulary has."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return [i for i in {*added.values(), *self.stop_tokens} if 0 <= i < self.vocab_size and not self.decode([i])]

    def chat(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt. The instruction is applied to the user's last message."""
        if self._tokenizer.chat_template is None:
            return self._encode(self._instruction.format(prompt=_only_text(prompt, self._warned)), special=True)
        tools = [*self.tools, *tools_of(prompt)]
        variables = self._template_kwargs | ({"tools": tools} if tools else {})
        messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        if self._system_prompt is not None and not any(message.role == "system" for message in messages):
            messages.insert(0, Message("system", self._system_prompt))
        asked = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        question = self._instruction.format(prompt=messages[asked].content)
        messages[asked] = messages[asked]._replace(content=question)
        try:
            fields = [message.fields for message in messages]
            with refusing_panics(self.directory):
                ids, template = render(self._tokenizer, fields, variables, self._template_time)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"model.path = {self.directory}: its chat template fails: {reason}; correct it, or remove it to send "
                "the prompt unchanged"
            ) from error
        self._check_fields({name for message in messages for name in message.extra if not _reads(template, name)})
        if tools and not _has_variable(template, "tools"):
            _warn_of_tools(f"the chat template of model.path = {self.directory}", self._warned)
        return ids

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], generation_prompt: bool
    ) -> str:
        """Return messages in the chat format as text, after the system prompt. Raises what the template raises."""
        variables = self._template_kwargs | ({"tools": [*tools]} if tools else {})
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        with refusing_panics(self.directory):
            return render_text(self._tokenizer, [*system, *messages], variables, self._template_time, generation_prompt)

    def control_tokens(self, text: str) -> list[str]:
        """Return the special tokens, the stop tokens and the other added tokens in `text`. None is one character."""
        added = self._tokenizer.added_tokens_decoder.items()
        found = [each.content for i, each in added if each.special or i in self.stop_tokens or each.content in text]
        return [token for token in found if len(token.strip()) > 1]

    def _check_fields(self, unread: set[str]) -> None:
        """Raise ConfigError for calls of tools that the template does not read. Warn once of other fields."""
        if calls := unread & CALLS:
            raise ConfigError(
                f"model.path = {self.directory}: its chat template does not read {', '.join(sorted(calls))} of "
                "messages; must have text in their place, or another template"
            )
        if unread := unread - self._warned:
            self._warned |= unread
            logger.warning(
                "model.path = %s: its chat template does not read fields of messages: %s",
                *(self.directory, ", ".join(sorted(unread))),
            )


def _warn_of_tools(owner: str, warned: set[str]) -> None:
    """Log once that the tools of prompts are not rendered. owner: what cannot take them. warned: owners so far."""
    if owner not in warned:
        warned.add(owner)
        logger.warning(
            "data.tools_field: prompts have tools, which %s cannot take; they are left out of the prompts", owner
        )


def _has_variable(template: str, name: str) -> bool:
    """Return whether a chat template has the name in its statements and expressions."""
    code = (part for block in re.split(r"\{[{%]", template)[1:] for part in re.split(r"[%}]\}", block)[:1])
    return any(re.search(rf"\b{name}\b", part) for part in code)


def _reads(template: str, name: str) -> bool:
    """Return whether a chat template has the name as an attribute or a key."""
    name = re.escape(name)
    return re.search(rf"""\.\s*{name}\b|(['"]){name}\1""", template) is not None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each id adds to the text of the ids before it. Joined, the texts equal `decode(ids)`.

    A character that spans several ids belongs to the last of them. The others, and ids that `decode` skips, give "".
    """
    texts = []
    # Decoding from the start each time would take quadratic time, so decode from `context`. ids[:done] have texts.
    context = done = 0
    for end in range(1, len(ids) + 1):
        before, after = tokenizer.decode(ids[context:done]), tokenizer.decode(ids[context:end])
        if after.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):  # an incomplete character
            texts.append("")
            continue
        texts.append(after[len(before) :])
        # The context must hold text: at the start of a text, a tokenizer may drop the space before a word.
        if texts[-1]:
            context = done
        done = end
    return texts


def token_id(option: str, token: int | str, tokenizer: Tokenizer) -> int:
    """Return the id of a token that an option gives as an id or as text.

    Raises ConfigError, naming the option, for text that the tokenizer does not have as exactly one token.
    """
    if not isinstance(token, str):
        return token

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text)
        except (ConfigError, TypeError, ValueError):  # TypeError: half of a surrogate pair
            return []

    ids = encode(token)
    texts = [tokenizer.with_special_tokens([each]) for each in ids]
    found = f"{len(ids)} tokens of the tokenizer, {show(texts)}"
    if len(ids) == 1:
        # Some tokenizers have another token for a word within a text than at its start. White space may merge.
        within = ids if token.isspace() else encode(f"\n{token}")[-1:]
        if texts == [token] and within in (ids, []):
            return ids[0]
        found = (
            f"read as {texts[0]!r}"
            if texts != [token]
            else f"token {ids[0]} at the start of a text, {within[0]} within"
        )
    raise ConfigError(f"{option} = {show(token)!r}: {found}; must be ids, or text that is exactly one token")


def _checked(instruction: str) -> str:
    """Return the instruction. Raises ConfigError unless it is a format string that holds {prompt}."""
    try:
        holds_prompt = "\0" in instruction.format(prompt="\0")
    except (LookupError, ValueError, AttributeError):
        holds_prompt = False
    if not holds_prompt:
        raise ConfigError(f"data.instruction = {instruction!r}: must hold {{prompt}}; other braces must be doubled")
    return instruction


def check_no_template(owner: str, system_prompt: str | None, template_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError if options of a chat template are set. owner: "option = value" that provides no template."""
    for name, value in {"system_prompt": system_prompt, "chat_template_kwargs": dict(template_kwargs)}.items():
        if value:
            raise ConfigError(f"data.{name} = {value}: must not be set, because {owner} has no chat template")


def _only_text(prompt: Prompt, warned: set[str]) -> str:
    """Return the text of a prompt: its own, or that of its only message if it has tools. Raises ConfigError."""
    if isinstance(prompt, Conversation) and prompt.tools:
        _warn_of_tools("a tokenizer without a chat template", warned)
        if len(prompt) == 1 and prompt[0] == Message("user", prompt[0].content):
            return prompt[0].content or ""
    if not isinstance(prompt, str):
        messages = json.dumps(prompt_fields(prompt), ensure_ascii=False)
        raise ConfigError(
            f"data.prompt_field: prompt = {show(messages)}: messages need a chat template, which the tokenizer lacks; "
            "must name a field of text"
        )
    return prompt
