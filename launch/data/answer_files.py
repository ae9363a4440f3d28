"""Files of answers, from which a draft learns.

A file has any format of launch.data.records. Its records have the fields

    prompt    as in the data, before instruction and chat format.
    response  text: the answer. A stop token is appended to it unless it ends with one, or with a stop string.
    tokens    optional: token ids of the answer, including its stop token if it has one. Used instead of `response`,
              because tokenizing the text may not give the generated tokens back.
    tools     optional: descriptions of tools for the chat template.

or, instead, a conversation in `messages` or `conversations`: objects with `role` and `content`, or `from` and `value`.
Each turn of the assistant is an answer to the messages before it, unless it calls tools.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.data.batches import check_ids, padded_length
from launch.data.json_lines import field_value, text_field
from launch.data.problems import Problem
from launch.data.prompts import (
    CALLS,
    messages_in,
    prompt_fields,
    read_message,
    read_prompt,
    tools_of,
    with_tool_calls,
)
from launch.data.records import read_records
from launch.data.responses import Answers
from launch.data.stop_strings import until_stop
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError

_FIELDS = "prompt", "response", "tokens", "tools", "messages", "conversations"
# Names of roles in conversations of `from` and `value`.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
_ROLES |= {"observation": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def answer_records(answers: Answers, problems: Sequence[Problem], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of answers. `answers.ids` index `problems`."""
    for problem, row, start, end in zip(
        answers.ids, answers.tokens, answers.prompt_lengths, answers.lengths, strict=True
    ):
        ids = row[start:end].tolist()
        prompt = problems[problem].prompt
        record = {"prompt": prompt_fields(prompt), "response": tokenizer.decode(ids), "tokens": ids}
        yield record | ({"tools": [*tools_of(prompt)]} if tools_of(prompt) else {})


def load_answers(
    path: str | Path, tokenizer: Tokenizer, max_prompt_tokens: int, max_new_tokens: int, vocab_size: int
) -> tuple[Answers, list[str]]:
    """Read a file of answers. Return them, and a line for each reason for which answers were left out or cut.

    Answers are cut after their first stop token or stop string, and to `max_new_tokens` tokens. Raises ConfigError for
    an invalid record, naming file and line, and if no answer is left.
    """
    rows: list[tuple[list[int], list[int]]] = []
    counts, total = Counter[str](), 0
    for turn, calls_tools, where in _turns_of(path):
        total += 1
        if calls_tools:
            counts["responses dropped: they call tools, which only the chat template can write as text"] += 1
            continue
        answer = _answer(turn, tokenizer, vocab_size, where)
        answer, after_stop = until_stop(answer, tokenizer)
        if not {*answer} - {*tokenizer.stop_tokens}:
            counts["responses dropped: empty"] += 1
            continue
        if tokenizer.decode(after_stop).strip():
            counts["responses cut at a stop token or stop string within them"] += 1
        has_prompt = not _is_blank(field_value(turn, "prompt", where))
        prompt = tokenizer.chat(read_prompt(turn, "prompt", where, "tools")) if has_prompt else []
        check_ids([*prompt, *answer], vocab_size, where)
        if not 0 < len(prompt) <= max_prompt_tokens:
            counts[f"responses dropped: prompt empty or over {max_prompt_tokens} tokens"] += 1
            continue
        if len(answer) > max_new_tokens:
            counts[f"responses cut to {max_new_tokens} tokens (rollout.max_new_tokens)"] += 1
        rows.append((prompt, answer[:max_new_tokens]))
    notes = [f"{count} of {total} {reason}" for reason, count in counts.items()]
    if not rows:
        reason = "; ".join(["must hold at least one answer to a prompt", *notes])
        raise ConfigError(f"responses = {path}: {reason}")
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    return Answers.pad([-1] * len(rows), rows, padded_length(longest, max_prompt_tokens + max_new_tokens)), notes


def _turns_of(path: str | Path) -> Iterator[tuple[dict[str, Any], bool, str]]:
    """Yield (turn, whether it calls tools, place) for each answer in a file, as `_turns` does."""
    for record, where in read_records("responses", path, "train", (), _FIELDS):
        for turn, calls_tools in _turns(record, where):
            yield turn | {"tools": record.get("tools")}, calls_tools, where


def _turns(record: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (object with `prompt` and `response`, whether it calls tools) for each answer in a record."""
    name = next((name for name in ("messages", "conversations") if record.get(name) is not None), None)
    if name is None or any(record.get(field) is not None for field in ("response", "tokens")):
        yield record, False
        return
    messages = messages_in(record[name], f"{where}: field {name!r}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: field {name!r} must be a list of messages")
    if "from" in (messages or [{}])[0]:
        names: dict[Any, Any] = {"from": "role", "value": "content"}
        messages = [{names.get(name, name): value for name, value in message.items()} for message in messages]
    messages = [message | {"role": _ROLES.get(str(message.get("role")), message.get("role"))} for message in messages]
    messages = [with_tool_calls(message, where) for message in messages]
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answered:
        yield {"prompt": messages, "response": ""}, False
    for index in answered:
        message = messages[index]
        if reasoning := next((field for field in _REASONING if message.get(field)), None):
            raise ConfigError(f"{where}: field {reasoning!r} of an answer cannot be read; must be part of its content")
        content, calls_tools = message.get("content"), any(message.get(name) for name in CALLS)
        if not calls_tools and not _is_blank(content):
            content = read_message(message, where).content
        # At the start of a conversation, or after another answer, there is no prompt for it.
        before = messages[index - 1] if index else {}
        has_prompt = before.get("role") in ("user", "tool") and not _is_blank(before.get("content"))
        yield {"prompt": messages[:index] if has_prompt else "", "response": content}, calls_tools


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _answer(turn: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, where: str) -> list[int]:
    """Return the ids of an answer as written: its tokens, else its text encoded, with a stop token."""
    ids = turn.get("tokens")
    if ids is None:
        is_empty = _is_blank(field_value(turn, "response", where))
        return [] if is_empty else [*tokenizer.encode(text_field(turn, "response", where)), tokenizer.stop_tokens[0]]
    if not isinstance(ids, list) or not all(type(x) is int and 0 <= x < vocab_size for x in ids):
        raise ConfigError(f"{where}: field 'tokens' must be a list of token ids below {vocab_size}")
    return ids
