"""Units beside a number, as far as two of them can be seen to differ."""

import re
from itertools import zip_longest

_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{\s*(?P<set>[^{}]*)\}|(?<=[\d\s}])(?P<bare>[A-Za-z][A-Za-z/ ]*))"
    r"(?:\s*\^\s*\{?-?\d\}?)?\s*$"
)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_POWERS = {"square", "squared", "sq", "cubic", "cubed", "unit", "of", "a"}


def units_differ(one: str, other: str) -> bool:
    """Return whether both texts have a unit, and not the same. Abbreviations and plurals of a unit are the same."""
    units = _unit(one), _unit(other)
    return all(units) and not all(_same(*pair) for pair in zip_longest(*units, fillvalue=""))


def _unit(text: str) -> list[str]:
    """Return the unit's words, of a quotient one after the other, and its power; [] without a unit."""
    if (sign := re.search("[$€£¥₹]", text.strip().removeprefix("$").removesuffix("$"))) and len(text) > 1:
        return [_CURRENCIES[sign.group()]]
    found = _UNIT.search(text[-60:])
    parts = re.split(r"/|\bper\b", (found["set"] or found["bare"] or "") if found else "")
    words = [[_singular(word) for word in re.findall("[A-Za-z]+", part)] for part in parts]
    kept = [next((word for word in part if word not in _POWERS), "") for part in words]
    power = re.search(r"\^\s*\{?\s*(-?\d)|(\bsq)|(\bcub)", found.group()) if found else None
    return [*filter(None, kept), *([power[1] or "23"[power.lastindex == 3]] if power and any(kept) else [])]


def _singular(word: str) -> str:
    """Return a word in lower case and without the s of a plural. Short ones are symbols, of which the case counts."""
    return word if len(word) < 3 else word.lower().removesuffix("s")


def _same(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if short == long or not short:
        return short == long
    letters = iter(long)
    abbreviates = short[0].lower() == long[0] and all(letter in letters for letter in short.lower())
    return abbreviates if len(long) > 3 else len(long) == 3 and long.startswith(short)
