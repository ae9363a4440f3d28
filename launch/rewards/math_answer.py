"""Whether two mathematical answers are equal, by math-verify."""

import logging

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError("math-verify is not installed: pip install 'specjax[hf]'") from None

# Its own timeouts are off: the pool's time limit is the one limit. It would warn about that once in every worker.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_answer(completion: str, answer: str) -> float:
    """1.0 where the completion's answer, boxed or last, equals `answer` (plain or LaTeX), else 0.0.

    Raises ValueError where `answer` itself cannot be read.
    """
    expected = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not expected:
        raise ValueError(f"cannot read the answer {answer!r}")
    given = parse(completion, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(expected, given, timeout_seconds=None))


def final_answer(completion: str) -> str | None:
    """The completion's answer, boxed or last, in a form that other ways of writing it share; None where there is none.

    Without a time limit: for completions that `math_answer` has scored within one.
    """
    given = parse(completion, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return str(given[0]) if given else None
