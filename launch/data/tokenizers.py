"""Text to token ids and back."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from launch.cli.errors import ConfigError
from launch.data.prompts import Message, Prompt

# The files of a tokenizer that a checkpoint carries beside its weights.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer. Ids are below `vocab_size`; a policy's own vocabulary may be wider."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a completion, at least one; the first is the one to train on."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without adding special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Stop tokens, special tokens and ids outside the vocabulary are skipped."""
        ...

    def chat(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt in the model's chat format, up to the start of the answer.

        Raises ConfigError for messages that the format cannot hold.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes, ids 0 .. 255, and one stop token, id 256. `instruction` as in `HuggingFaceTokenizer`."""

    vocab_size = 257
    stop_tokens = (256,)

    def __init__(self, instruction: str = "{prompt}") -> None:
        self._instruction = _checked(instruction)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def chat(self, prompt: Prompt) -> list[int]:
        return self.encode(self._instruction.format(prompt=_only_text(prompt)))


class CharacterTokenizer:
    """The characters of `alphabet`, ids 0, 1, .., and one stop token after them.

    `instruction` as in `HuggingFaceTokenizer`.
    """

    def __init__(self, alphabet: str, instruction: str = "{prompt}") -> None:
        self._alphabet, self._instruction = alphabet, _checked(instruction)
        self.vocab_size = len(alphabet) + 1
        self.stop_tokens = (len(alphabet),)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ConfigError for a character outside the alphabet."""
        for character in text:
            if character not in self._alphabet:
                raise ConfigError(f"text = {text!r}: {character!r} is none of the characters {self._alphabet!r}")
        return [self._alphabet.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i] for i in ids if 0 <= i < len(self._alphabet))

    def chat(self, prompt: Prompt) -> list[int]:
        return self.encode(self._instruction.format(prompt=_only_text(prompt)))


class HuggingFaceTokenizer:
    """The tokenizer in a checkpoint's directory, with its chat template where it has one.

    directory:       a local directory in Hugging Face layout.
    instruction:     what becomes of a prompt before the chat template, in `str.format` syntax, for example
                     "{prompt}\\nPut the answer in \\\\boxed{{}}."
    enable_thinking: handed to the chat template where set; a template that does not know it ignores it.

    The stop tokens are the tokenizer's own and those of `generation_config.json` and `config.json`. Raises ConfigError
    for a missing directory or package, one without a usable tokenizer or stop token, and a malformed instruction.
    """

    def __init__(
        self, directory: str | Path, *, instruction: str = "{prompt}", enable_thinking: bool | None = None
    ) -> None:
        self._tokenizer = _load(Path(directory))
        self._instruction = _checked(instruction)
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        # Ids may have gaps, so that there are fewer tokens than the highest id says.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._directory = directory
        self.stop_tokens = _stop_tokens(self._tokenizer, Path(directory))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        # Not every stop token of generation_config.json is special to the tokenizer.
        kept = [i for i in ids if 0 <= i < self.vocab_size and i not in self.stop_tokens]
        return self._tokenizer.decode(kept, skip_special_tokens=True)

    def chat(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt. The instruction applies to its last message, the user's."""
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(self._instruction.format(prompt=_only_text(prompt)))
        *earlier, last = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        question = Message("user", self._instruction.format(prompt=last.content))
        try:
            return self._tokenizer.apply_chat_template(
                [message._asdict() for message in (*earlier, question)],
                add_generation_prompt=True,
                return_dict=False,
                **self._template_options,
            )
        except Exception as error:  # a template is a program: it may raise whatever it likes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"model.path = {self._directory}: its chat template fails: {reason}; mend it, or remove it to send the "
                "prompt as it is"
            ) from error


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each id adds to the ids before it. Joined, the texts equal `decode(ids)`.

    A character of several ids belongs to the last of them. The other ids, and ids that `decode` skips, give "".
    """
    texts, begin, shown = [], 0, 0
    for end in range(1, len(ids) + 1):
        # From a place where characters began: decoding all for each id would take time by the square.
        before, after = tokenizer.decode(ids[begin:shown]), tokenizer.decode(ids[begin:end])
        if after.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(after[len(before) :])
        if texts[-1]:  # else there is nothing here that a space could follow
            begin = shown
        shown = end
    return texts


def _load(directory: Path) -> Any:
    if not directory.is_dir():
        raise ConfigError(f"model.path = {directory}: no such directory")
    # Of transformers we use the tokenizers alone: that it finds no PyTorch is no news.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            "model.path: transformers is not installed, for its tokenizer: pip install 'specjax[hf]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises a different kind for each file that is missing or malformed
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path = {directory}: cannot load a tokenizer from it: {reason}") from error


def _checked(instruction: str) -> str:
    try:
        kept = "\0" in instruction.format(prompt="\0")
    except (LookupError, ValueError, AttributeError):
        kept = False
    if not kept:
        raise ConfigError(f"data.instruction = {instruction!r}: must hold {{prompt}}, and other braces doubled")
    return instruction


def _only_text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ConfigError("data.prompt_field: prompts are lists of messages, which need a model with a chat template")
    return prompt


def _stop_tokens(tokenizer: Any, directory: Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's own first, then those that the model's files name."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for path in (directory / "generation_config.json", directory / "config.json"):
        ids += _listed_stops(path) if path.exists() else []
    if not ids:
        raise ConfigError(f"model.path = {directory}: names no end-of-sequence token, so no completion would stop")
    return tuple(dict.fromkeys(ids))


def _listed_stops(path: Path) -> list[int]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(f"model.path = {path.parent}: its {path.name} is not a JSON object") from None
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"model.path = {path.parent}: eos_token_id = {listed!r} in {path.name}: must be token ids")
    return ids


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the files of a tokenizer that `source` has."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
