"""Files of answers, from which a draft learns.

A file has any format of launch.data.records. Its records have the fields

    prompt    as in the data, before instruction and chat format.
    response  text: the answer. A stop token is appended to it unless it ends with one.
    tokens    optional: token ids of the answer, including its stop token if it has one. Used instead of `response`,
              because tokenizing the text may not give the generated tokens back.

or, instead, a conversation in `messages` or `conversations`: objects with `role` and `content`, or `from` and `value`.
Each turn of the assistant is an answer to the messages before it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.cli.errors import ConfigError
from launch.data.batches import check_ids
from launch.data.json_lines import field_value, text_field
from launch.data.problems import Problem
from launch.data.prompts import read_message, read_prompt, to_json
from launch.data.records import Records, read_records
from launch.data.responses import Answers
from launch.data.tokenizers import Tokenizer

# Names of roles in conversations of `from` and `value`.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def answer_records(answers: Answers, problems: Sequence[Problem], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of answers. `answers.ids` index `problems`."""
    for problem, row, start, end in zip(
        answers.ids, answers.tokens, answers.prompt_lengths, answers.lengths, strict=True
    ):
        ids = row[start:end].tolist()
        yield {"prompt": to_json(problems[problem].prompt), "response": tokenizer.decode(ids), "tokens": ids}


def load_answers(
    path: str | Path, tokenizer: Tokenizer, max_prompt_tokens: int, max_new_tokens: int, vocab_size: int
) -> tuple[Answers, list[str]]:
    """Read a file of answers. Return them, and a line for each reason for which answers were left out or cut.

    Answers are cut to `max_new_tokens` tokens, and text also after the first stop token in it. Raises ConfigError for
    an invalid record, naming file and line, and if no answer is left.
    """
    rows: list[tuple[list[int], list[int]]] = []
    counts = Counter[str]()
    for turn, where in _turns_of(path):
        counts["all"] += 1
        ids = turn.get("tokens")
        if ids == [] or (ids is None and _is_blank(field_value(turn, "response", where))):
            counts["responses dropped: empty"] += 1
            continue
        asked = not _is_blank(field_value(turn, "prompt", where))
        prompt = tokenizer.chat(read_prompt(turn, "prompt", where)) if asked else []
        if ids is None:
            ids, rest = _until_stop(tokenizer.encode(text_field(turn, "response", where)), tokenizer.stop_tokens)
            if tokenizer.decode(rest).strip():
                counts["responses cut at a stop token within them"] += 1
        answer = _checked_ids(ids, vocab_size, where)
        while len(answer) > 1 and {*answer[-2:]} <= {*tokenizer.stop_tokens}:  # rows padded with it
            answer = answer[:-1]
        check_ids([*prompt, *answer], vocab_size, where)
        if not 0 < len(prompt) <= max_prompt_tokens:
            counts[f"responses dropped: prompt empty or over {max_prompt_tokens} tokens"] += 1
            continue
        if len(answer) > max_new_tokens:
            counts[f"responses cut to {max_new_tokens} tokens (rollout.max_new_tokens)"] += 1
        rows.append((prompt, answer[:max_new_tokens]))
    total = counts.pop("all", 0)
    notes = [f"{count} of {total} {reason}" for reason, count in counts.items()]
    if not rows:
        reason = "; ".join(["must hold at least one answer to a prompt", *notes])
        raise ConfigError(f"{path}: {reason}")
    return Answers.pad([-1] * len(rows), rows, max_prompt_tokens + max_new_tokens), notes


def _turns_of(path: str | Path) -> Records:
    """Yield (turn, place) for each answer in a file, as `_turns` does."""
    for record, where in read_records("responses", path, "train"):
        for turn in _turns(record, where):
            yield turn, where


def _turns(record: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield an object with `prompt` and `response` for each answer in a record of a file of answers."""
    name = next((name for name in ("messages", "conversations") if record.get(name) is not None), None)
    if name is None or any(record.get(field) is not None for field in ("response", "tokens")):
        yield record
        return
    messages = record[name]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: field {name!r} must be a list of messages")
    if "from" in (messages or [{}])[0]:
        messages = [{"role": message.get("from"), "content": message.get("value")} for message in messages]
    messages = [message | {"role": _ROLES.get(str(message.get("role")), message.get("role"))} for message in messages]
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answered:
        yield {"prompt": messages, "response": ""}
    for index in answered:
        message = messages[index]
        if reasoning := next((field for field in _REASONING if message.get(field)), None):
            raise ConfigError(f"{where}: field {reasoning!r} of an answer cannot be read; must be part of its content")
        content = message.get("content")
        content = content if _is_blank(content) else read_message(message, where).content
        # At the start of a conversation, or after another answer, there is no prompt for it.
        before = messages[index - 1] if index else {}
        asked = before.get("role") in ("user", "tool") and not _is_blank(before.get("content"))
        yield {"prompt": messages[:index] if asked else "", "response": content}


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _until_stop(ids: list[int], stop_tokens: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the ids of an answer, which ends with its first stop token, and the ids after it. Append a missing one."""
    end = next((index for index, token in enumerate(ids) if token in stop_tokens), None)
    return ([*ids, stop_tokens[0]], []) if end is None else (ids[: end + 1], ids[end + 1 :])


def _checked_ids(value: Any, vocab_size: int, where: str) -> list[int]:
    """Return `value`. Raises ConfigError unless it is a non-empty list of token ids."""
    valid = isinstance(value, list) and value and all(type(x) is int and 0 <= x < vocab_size for x in value)
    if not valid:
        raise ConfigError(f"{where}: field 'tokens' must be a non-empty list of token ids below {vocab_size}")
    return value
