"""Options: dataclasses whose fields declare what they accept, checked in one place when they are made.

A number declares its range, as in `decay: Annotated[float, above(0), at_most(1)]`; a word its choices, with `Literal`.
"""

import operator
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# The largest int32. JAX computes sizes, positions and steps in int32.
MOST = 2**31 - 1
_ACCEPTS = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
    "0 or at least": lambda value, limit: value == 0 or value >= limit,
}


@dataclass(frozen=True)
class Bound:
    """One end of the range of a number. relation: a key of `_ACCEPTS`."""

    relation: str
    limit: float | int

    def accepts(self, value: float | int) -> bool:
        return _ACCEPTS[self.relation](value, self.limit)

    def __str__(self) -> str:
        return f"{self.relation} {self.limit}"


def at_least(limit: float | int) -> Bound:
    return Bound("at least", limit)


def above(limit: float | int) -> Bound:
    return Bound("above", limit)


def at_most(limit: float | int) -> Bound:
    return Bound("at most", limit)


def below(limit: float | int) -> Bound:
    return Bound("below", limit)


def zero_or_at_least(limit: float | int) -> Bound:
    return Bound("0 or at least", limit)


Positive = Annotated[int, at_least(1), at_most(MOST)]
NonNegative = Annotated[int, at_least(0), at_most(MOST)]
Fraction = Annotated[float, at_least(0), at_most(1)]
# Weights, factors and limits that have no natural maximum; large enough for any use, and finite.
Weight = Annotated[float, at_least(0), at_most(1e6)]
Factor = Annotated[float, above(0), at_most(1e6)]
# Networks are traced layer by layer, experts are stored one by one, and drafts are traced token by token.
MOST_LAYERS = 256
Layers = Annotated[int, at_least(1), at_most(MOST_LAYERS)]
MOST_EXPERTS = 4096
Experts = Annotated[int, at_least(1), at_most(MOST_EXPERTS)]
MOST_DRAFTED = 128
DraftLength = Annotated[int, at_least(0), at_most(MOST_DRAFTED)]


class Options:
    """Base of dataclasses of options: every field is checked when one is made.

    A subclass with a `__post_init__` of its own calls this one first. Its checks then see values within their ranges.
    """

    def __post_init__(self) -> None:
        check_options(self)


def check_options(options: object) -> None:
    """Raise ValueError for the first dataclass field whose value its annotation does not allow.

    Numbers, text, booleans, words of a `Literal`, and unions and tuples of them are checked. Other types are not.
    """
    for name, hint in checked_fields(type(options)).items():
        value = getattr(options, name)
        if not _accepts(hint, value):
            raise ValueError(f"{name} = {show(value)}: must be {_allowed(hint)}")


@cache
def checked_fields(kind: type) -> dict[str, Any]:
    """Return the annotations of the fields that `check_options` checks, by name."""
    return {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if _is_checked(hint)}


def show(value: object) -> str:
    """Return the value as text, cut to 80 characters."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to write integers of more than 4300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def nearest_multiples(value: int, factor: int) -> str:
    """Return the positive multiples of `factor` on both sides of `value`, for messages: "24 or 32"."""
    below = value // factor * factor
    near = [value] if below == value else [below, below + factor]
    return " or ".join(str(each) for each in near if each)


def nearest_divisors(value: int, number: int) -> str:
    """Return the divisors of `number` on both sides of `value`, for messages: "2 or 4"."""
    if value > number:
        return str(number)
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below, above = ([each for each in divisors if each < value], [each for each in divisors if each > value])
    return " or ".join(map(str, below[-1:] + above[:1])) or "1"


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; the hint itself if it is none."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_checked(hint: Any) -> bool:
    nested = alternatives(hint)
    if len(nested) > 1 or get_origin(hint) is tuple:
        return any(map(_is_checked, nested if len(nested) > 1 else get_args(hint)))
    return hint in (int, float, bool, str) or get_origin(hint) in (Annotated, Literal)


def _accepts(hint: Any, value: object) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_accepts(each, value) for each in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        items = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(items) == len(value) and all(map(_accepts, items, value))
    if kind is Annotated:
        number, *bounds = inner
        return _accepts(number, value) and all(bound.accepts(value) for bound in bounds)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _allowed(hint: Any) -> str:
    """Return what a field accepts, for messages."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return ", or ".join(_allowed(each) for each in sorted(inner, key=lambda each: each is NoneType))
    if kind is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if kind is tuple:
        return f"a tuple, each {' then '.join(_allowed(each) for each in inner if each is not Ellipsis)}"
    if kind is Annotated:
        return f"{_allowed(inner[0])} {' and '.join(map(str, inner[1:]))}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "text", NoneType: "none"}
    return names.get(hint, f"a {hint.__name__}")
