r"""Boxes, the form in which models are asked to give an answer: `\boxed{4}`."""

import re

# Names of functions and operators in plain text. Other words of three letters or more name a unit or a thing.
FUNCTIONS = {"and", "arccos", "arcsin", "arctan", "cos", "cot", "csc", "exp", "gcd", "lcm", "lim", "log", "max", "min"}
FUNCTIONS |= {"mod", "sec", "sin", "sqrt", "tan", "frac", "infty", "inf"}
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"


def boxed(answer: str) -> str:
    r"""Return the answer as `\boxed{answer}`."""
    return f"\\boxed{{{answer}}}"


def last_box(text: str) -> str | None:
    r"""Return what is in the last `\boxed{..}` of a text, "" if it does not close, and None if there is none.

    A brace after a backslash is part of the answer.
    """
    openings = list(re.finditer(r"\\boxed\s*(\{|[^\s{]\S*)", text))
    if not openings:
        return None
    opening = openings[-1]
    if opening.group(1) != "{":  # \boxed 5
        return opening.group(1)
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return ""


def other_box(text: str) -> str | None:
    """Return what is in the box before the last one, if only "or" stands between them, so that they are alternatives."""
    before = text[: text.rfind("\\boxed")]
    return last_box(before) if re.search(r"\}(?:[^.!?\n{}]*(?:\bor\b|或)[^.!?\n{}]*|[\s$]*[/|][\s$]*)$", before) else None


def stated_answers(answer: str) -> list[str]:
    """Return completions that state an answer: in a box and, if it is a number with words beside it, that number alone.

    A model that is asked for a number in a box leaves the words out.
    """
    plain = re.sub(r"\\(?:text|mathrm|mbox)\b", " ", answer)
    words = {word.lower() for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", plain)} - FUNCTIONS
    number = re.search(rf"-?(?:{NUMBER})", answer)
    alone = [boxed(number.group())] if number and (words or re.search("[€£¥₹₩]|\\d(?:st|nd|rd|th)\\b", plain)) else []
    return [boxed(answer), *alone]
