"""The scorer `math`: math-verify, and guards where it computes a value that was not written.

math-verify reads whatever text it gets as an expression: 2516_8 as 2516, 2025-01-02 as 2022, 10:05 as 2, and the answer
in "It is 4 or 5" as 5.
"""

import logging
import re
from fractions import Fraction
from typing import Any, NamedTuple

from launch.rewards.boxes import FUNCTIONS, NUMBER, boxed, last_box, other_box
from launch.rewards.units import units_differ

_SIGNED = rf"[-+]?(?:{NUMBER})"
_FRACTION = rf"{_SIGNED}(?:\s*/\s*{_SIGNED})?"
# Texts of digits and separators that are a number, a fraction, a list of them, or a ratio.
_ARITHMETIC = re.compile(rf"{_FRACTION}(?:\s*[,;]\s*{_FRACTION})*|{_SIGNED}\s*:\s*{_SIGNED}")
# Writings that are no expression: only the same text is equal to them.
_LITERAL = re.compile(
    # A numeral with its base, of which one above ten has letters.
    r"(?<![\dA-Za-z\\^])(?:\d+\s*[)\]}]*\s*_|\d[\dA-Fa-f]*\s*[)\]}]*\s*_\s*\{?\s*(?:1[1-9]|[2-9]\d))"
    r"|\b0[xXbBoO][\dA-Fa-f]+|\bbase\b"
    r"|(?<![\\A-Za-z\d_^])(?!log|ln|sqrt|pi|sin|cos|tan)[A-Za-z]+\d"  # names: A1
    # Bounds, negations and alternatives.
    r"|^(?:[<>≠≤≥]|\\(?:neq?|leq?|geq?|[lg]t)\b)|\b(?:not|than|at\s+(?:least|most))\b|[-/]\s*or\b|\bor\s+[a-z]{2}"
    r"|\d\.\d+\.\d|\d\.\.|\.\.\s*\d"  # versions, ranges
    r"|\b\d{4}-\d{1,2}-\d{1,2}(?!\d)"  # dates
    r"|\\(?:to|(?:long)?rightarrow|Rightarrow|lor|vee|[lc]?dots|langle)\b|->|→|…"  # ranges, alternatives
    r"|\d\s*'"  # minutes and seconds
)
# What is a time, unless it is compared with a ratio.
_TIME = re.compile(r"(?<!\d)\d{1,2}:[0-5]\d(?!\d)")
_RATIO = re.compile(r":|/|\\[dt]?frac\b")
# Words between two numbers, also of a unit: 2 hours 30, 4 (or 5).
_WORDS_BETWEEN = re.compile(r"(?<=\d)([\s{(]*[^\W\d_][^\d,;\\^_=+*/<>|&-]*)(?=\d)")
# Before a number that is not the answer.
_DENIED = r"(?:\b(?:not|cannot|never|neither|than|at (?:least|most)|below|above|under|up to)|n['’]t)\b"
_NEGATION = re.compile(rf"{_DENIED}\s+(?:[a-z]+\s+){{0,2}}[^\w\s]{{0,3}}$", re.IGNORECASE)
_ALTERNATIVE = r"(?:,|;|/|\||&|[-–—]|\b(?:or|and|to|versus|vs)\b\.?)\s*(?:(?:or|and)\s+)?[^\w\s=]{0,3}"
# Characters around an answer that are searched for a further part of it, or another one.
_NEAR = 80
_SPACE = r"\\[,;:! ]|~|\{,\}|[ \u00a0\u2009\u202f]"


class Value(NamedTuple):
    """An answer: its text, what math-verify makes of it, and whether only the same text equals it."""

    text: str
    parsed: list[Any]
    literal: bool


class MathScorer:
    """Compares the last boxed answer with the expected one; without a box, the last answer in the text.

    A last box that does not close is not an answer: the completion was cut off, or is malformed. Nor are several
    alternatives, and what is denied. math-verify's own timeouts are off because the pool has a time limit. So call
    `final_answer` only on completions that were scored within that limit.
    """

    def __init__(self) -> None:
        try:
            from math_verify import parse, verify
        except ImportError:
            raise ImportError("math-verify is not installed: pip install -e '.[hf]' in a clone") from None
        # Otherwise every worker warns that math-verify's timeouts are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse, self._verify = parse, verify

    def score(self, completion: str, answer: str) -> float:
        """Return 1.0 if the completion gives the answer, else 0.0. Raises ValueError if the answer cannot be read."""
        expected, given = self._value(answer), self._given(completion)
        if not expected.parsed:
            raise ValueError(f"cannot read the answer {answer!r}")
        return float(given is not None and self._equal(expected, given))

    def final_answer(self, completion: str) -> str | None:
        """Return the answer of a completion; the same text for equal numbers."""
        given = self._given(completion)
        if given is None or not given.parsed:
            return None
        literal = given.literal or _TIME.search(given.text)
        return canonical(given.text) if literal else _standard(given)

    def _value(self, text: str) -> Value:
        """Read an answer as it stands in a box."""
        text = tidied(text)
        return Value(text, self._parsed(boxed(text)), is_literal(text))

    def _given(self, completion: str) -> Value | None:
        """Read the answer of a completion; None if it gives none."""
        box = last_box(completion)
        if box is not None:
            other, value = other_box(completion), self._value(box)
            several = other is not None and not self._equal(self._value(other), value)
            return None if several or not box.strip() else value
        parsed = self._parsed(completion)
        if not parsed:
            return None
        stated = str(parsed[-1]).strip(" .,;:!?*$")
        place = _place_of(stated, completion)
        if place is None:  # math-verify has rewritten it
            return Value(stated, parsed, is_literal(stated))
        denied = _NEGATION.search(completion[max(place[0] - _NEAR, 0) : place[0]])
        return None if denied or _has_alternatives(completion, *place) else self._value(completion[slice(*place)])

    def _parsed(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def _equal(self, expected: Value, given: Value) -> bool:
        texts = expected.text, given.text
        times = [bool(_TIME.search(text)) for text in texts]
        ratio = any(_RATIO.search(text) for text, time in zip(texts, times, strict=True) if not time)
        if expected.literal or given.literal or (any(times) and not ratio):
            return canonical(expected.text) == canonical(given.text)
        words, other = map(_words, texts)
        if words and other and (words != other or len(words) == 1):
            return words == other
        expected, given = self._bracketed_alike(expected, given)
        if {list_brackets(expected.text), list_brackets(given.text)} in ({"\\{", "("}, {"\\{", "["}):
            return False  # a set is no tuple
        if units_differ(expected.text, given.text) and all(map(_is_number, (expected, given))):
            return False
        return self._verify(expected.parsed, given.parsed, timeout_seconds=None)

    def _bracketed_alike(self, *values: Value) -> list[Value]:
        """Return two answers, a bare list with the brackets of a tuple that is the other: then the order counts."""
        brackets = [list_brackets(value.text) for value in values]
        opening = next((each for each in brackets if each in ("(", "[")), "")
        closing = {"(": ")", "[": "]"}.get(opening, "")
        bare = [opening and each == "" for each in brackets]
        return [
            self._value(f"{opening}{value.text}{closing}") if wrap else value
            for value, wrap in zip(values, bare, strict=True)
        ]


def tidied(text: str) -> str:
    """Return an answer without a closing stop or comma, with mixed numbers and thousands as math-verify reads them."""
    text = re.sub(r"(?<![.,;\s])\s*[.,;]$", "", text.strip()).replace("°", "^\\circ")
    text = text.replace("²", "^2").replace("³", "^3")
    text = re.sub("[₀-₉]+", lambda digits: "_{" + digits.group().translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"(?<=\d)\s*_\s*(?:\{\s*10\s*\}|10(?!\d))", "", text)  # base 10
    text = re.sub(r"(?<![\d./,])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d./])", r"\1\\frac{\2}{\3}", text)
    thousands = rf"(?<![\d.,])\d{{1,3}}(?:(?:{_SPACE})\d{{3}})+(?!\d)"
    return re.sub(thousands, lambda number: re.sub(_SPACE, "", number.group()), text)


_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def is_literal(text: str) -> bool:
    """Return whether an answer is no expression: a numeral with a base, a date, time, version or range, or several."""
    plain = _plain(text)
    if _LITERAL.search(plain) or ("&" in plain and "\\begin" not in plain):
        return True
    texts = re.findall(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", text)
    outside = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", "", text)
    if any(re.search(r"\d", each) for each in texts) and re.search(r"\d", outside):
        return True  # math-verify drops what is in \text
    for words in _WORDS_BETWEEN.findall(plain):
        if words.strip(" {}") not in {"or", *FUNCTIONS}:
            return True
    if re.search(r"(?<![\d_])\d+\s+\d", plain) and not re.search(r"\\(?:[dt]?frac|[dt]?binom|begin)", plain):
        return True
    separated = re.fullmatch(r"[\d\s.,:;/+-]+", plain) and re.search(r"\d", plain) and "+" not in plain[1:]
    return bool(separated) and _ARITHMETIC.fullmatch(plain) is None


def canonical(text: str) -> str:
    """Return the text of an answer for comparison: without brackets, case, leading zeros and spaces, but in numbers."""
    plain = re.sub(r"[\s{}()\[\]]+", " ", _plain(text)).lower()
    plain = re.sub(r"(?<!\d) | (?!\d)", "", plain)
    plain = re.sub(r"_?(?:in)?base", "_", plain)
    return plain if "." in plain else re.sub(r"(?<!\d)0+(?=\d)", "", plain)


def _plain(text: str) -> str:
    """Return the text without commands that only set it."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox|left|right)\b", " ", text)
    text = re.sub(r"\\[,;:! ]|~|\\?\$", " ", text)
    return re.sub("[‐‑‒–—−]|--", "-", text).strip()


def list_brackets(text: str) -> str | None:
    r"""Return how a list is bracketed: "(", "[", "\\{", or "" for a bare one. None: it is not only a list."""
    text = re.sub(r"\\(?:left|right)\b|\s", "", text).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    if re.search("[=<>]", text):
        return None
    depth, commas, closes = 0, set[int](), list[int]()
    for token in re.finditer(r"\\?[{}]|[()\[\],]", text):
        character = token.group()[-1]
        depth += (character in "([{") - (character in ")]}")
        if character == ",":
            commas.add(depth)
        elif depth == 0:
            closes.append(token.end())
    if 0 in commas:
        return ""
    opening = re.match(r"\\\{|[(\[]", text)
    return opening.group() if opening and 1 in commas and closes == [len(text)] else None


def _words(text: str) -> list[str]:
    """Return the items of a list of words, sorted; [] if it is another. math-verify would multiply their letters."""
    items = [re.sub(r"[\s{}()'’-]", "", item) for item in re.split("[,;]", _plain(text).lower())]
    return sorted(items) if max(map(len, items)) > 1 and all(map(str.isalpha, items)) else []


def _standard(value: Value) -> str:
    """Return the text of a parsed answer; of a number in lowest terms. Powers may be too large to be computed."""
    parsed = value.parsed[0]
    if not _is_number(value) or re.search(r"[\^!]", value.text):
        return str(parsed)
    from sympy import nsimplify

    return str(nsimplify(parsed.doit(), rational=True))


def _is_number(value: Value) -> bool:
    return bool(value.parsed) and getattr(value.parsed[0], "is_number", False)


def _place_of(stated: str, text: str) -> tuple[int, int] | None:
    """Return where a text states an answer: after the last word "answer", else the last time. None: nowhere.

    It goes on as far as a base, a further part of a date or version, or a command.
    """
    pattern = "".join(re.escape(each) + ("[, ]?" if each.isdigit() else "") for each in stated[:-1])
    found = list(re.finditer(rf"(?<![\d.]){pattern}{re.escape(stated[-1:])}", text)) if stated else []
    if not found:
        return None
    asked = text.lower().rfind("answer")
    place = next((each for each in found if asked >= 0 and each.start() > asked), found[-1])
    before = re.search(r"\d[\d.,_:/–-]*[._:/–-]$", text[max(place.start() - _NEAR, 0) : place.start()])
    after = re.match(r"\s*\\?%|(?:[\dA-Za-zΑ-ω]|[._:/–-]\d|[_^\\])\S*", text[place.end() :])
    start = place.start() - len(before.group() if before else "")
    end = place.end() + len(after.group().rstrip(".,;:!?*)$") if after else "")
    return start, end


def _has_alternatives(text: str, start: int, end: int) -> bool:
    """Return whether the sentence around an answer goes on to another number, or comes from one, as in "4 or 5"."""
    before = re.split(r"[.!?]\s|\n", text[max(start - _NEAR, 0) : start])[-1]
    after = re.split(r"[.!?](?:\s|$)|\n", text[end : end + _NEAR])[0]
    numbers = re.findall(_FRACTION, before + text[start:end] + after)
    begun = re.match(r"\s*or\b", before, re.IGNORECASE) is not None
    if begun or len({_fraction(number) for number in numbers}) == 1:
        return begun
    word = r"\W{0,3}(?:[A-Za-z%°]+\s*)?"
    return bool(
        re.match(rf"{word}{_ALTERNATIVE}\d", after)
        or re.search(r"\bor\b[^=]*(?:=[^=]*)?\d", after)
        or re.search(rf"\d{word}{_ALTERNATIVE}$", before)
        or re.search(r"\d\W*\bor\b[\s,]+(?:[a-z]+[\s,]+){0,3}(?:\w\s*=\s*)?[^\w\s]{0,3}$", before)
        or re.search(r"\b(?:either|maybe|perhaps|possibly)\b.*\d", before, re.IGNORECASE)
    )


def _fraction(text: str) -> Fraction | str:
    numerator, _, denominator = re.sub(r"[,\s]", "", text).partition("/")
    below = Fraction(denominator or 1)
    return Fraction(numerator) / below if below else text
