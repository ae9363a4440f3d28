"""Render a model's chat template, which is untrusted code: it may read the clock or never end."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

# Seconds of this thread's own work for one prompt. Templates take milliseconds.
LIMIT_S = 5.0


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], now: datetime
) -> tuple[list[int], str]:
    """Return the ids of messages in the chat format of a Hugging Face tokenizer, and the template that was rendered.

    Raises TimeoutError after LIMIT_S, and whatever the template raises. Outside the main thread there is no limit.

    variables: further variables of the template.
    now:       the time that its strftime_now shows.
    """
    return _apply(tokenizer, messages, variables, now, add_generation_prompt=True)


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    now: datetime,
    generation_prompt: bool,
) -> str:
    """Return the text whose ids `render` returns, with or without the start of an answer. Raises the same."""
    return _apply(tokenizer, messages, variables, now, add_generation_prompt=generation_prompt, tokenize=False)[0]


def _apply(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], now: datetime, **options: bool
) -> tuple[Any, str]:
    """Return what apply_chat_template makes of messages, and the template."""
    # transformers imports slowly, and is optional.
    from transformers.utils import chat_template_utils

    template = tokenizer.get_chat_template(variables.get("chat_template"), variables.get("tools"))
    with _time_limit():
        # The compiled template is cached. transformers passes no functions on to it.
        chat_template_utils._compile_jinja_template(template).globals["strftime_now"] = now.strftime
        arguments = {**variables, **options, "chat_template": template, "return_dict": False}
        return tokenizer.apply_chat_template(messages, **arguments), template


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in the block after LIMIT_S of its own work. Without a limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()

    def check(*_: object) -> None:
        if time.thread_time() - start > LIMIT_S:
            raise TimeoutError(f"it has not ended after {LIMIT_S:g} s")

    # A timer of work, so that a process that was suspended is not late. Other threads' work counts for it too.
    previous = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S / 10, LIMIT_S / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
