r"""Boxes, the form in which models are asked to give an answer: `\boxed{4}`."""

import re

# Names of functions and operators in plain text. Other words of three letters or more name a unit or a thing.
FUNCTIONS = {"and", "arccos", "arcsin", "arctan", "cos", "cot", "csc", "exp", "gcd", "lcm", "lim", "log", "max", "min"}
FUNCTIONS |= {"mod", "sec", "sin", "sqrt", "tan", "frac", "infty", "inf"}
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_TERM = rf"(?:{NUMBER}|\\[dt]?frac\{{[\d.]+\}}\{{[\d.]+\}}|\\sqrt\{{[\d.]+\}}|\\pi\b)(?:\s*\^\s*(?:\d|\{{-?\d+\}}))?"
_SIGN = r"(?![×·÷−√∞])[^\x00-\x7f\w\s]"
# A number as it is written: terms, and operators between them.
_EXPRESSION = re.compile(rf"-?{_TERM}(?:\s*(?:[/*+-]|\\(?:cdot|times)\b)?\s*{_TERM})*")


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
    """Return what is in the box before the last one, if they are alternatives, as "or" between them says."""
    before = text[: text.rfind("\\boxed")]
    alternative = re.search(r"\}(?:[^.!?\n]{0,40}(?:\bor\b|或)[^.!?\n]{0,40}|[\s$]*[/|][\s$]*)$", before)
    return last_box(before) if alternative else None


def stated_answers(answer: str) -> list[str]:
    """Return completions that state an answer: in a box and, if it is a number with words beside it, only that number.

    A model that is asked for a number in a box leaves the words out.
    """
    plain = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1", answer)
    # A power of the unit is no part of the number.
    plain = re.sub(r"(?<=[A-Za-z])\s*\^\s*\{?-?\d\}?", " ", plain)
    numbers = list(_EXPRESSION.finditer(plain))
    if len(numbers) != 1 or re.search("[=<>,;]", plain.replace(numbers[0].group(), "")):
        return [boxed(answer)]
    (number,) = numbers
    before, after = plain[: number.start()], plain[number.end() :]
    # Letters that touch a number are variables, unless they are a word. What is no letter is a sign, as ° and €.
    beside = re.match(rf"\s+[^\W\d_]|[^\W\d_]{{2}}|\s*{_SIGN}", after)
    words = beside or re.search(rf"[^\W\d_]{{2}}\.?\s|{_SIGN}", before)
    named = {word.lower() for word in re.findall(r"[A-Za-z]+", before + after)} & FUNCTIONS or "\\" in before
    return [boxed(answer), *([boxed(number.group().strip())] if words and not named else [])]
