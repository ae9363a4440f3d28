"""Shapes of JSON values: what a record must look like for a reader to take it."""

from typing import Any

LARGEST = 3.4e38


def matches_schema(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has the fields and types of a schema, `shape`.

    A type, or a union of types, fits its values; a bool is no number, and numbers are within float32. [shape] fits
    lists, (a, b) lists of two, and a dict of shapes objects with at least these fields. {str: shape} fits objects whose
    every value fits.
    """
    match shape:
        case [each] if isinstance(shape, list):
            return isinstance(value, list) and all(matches_schema(item, each) for item in value)
        case tuple():
            return isinstance(value, list) and len(value) == len(shape) and all(map(matches_schema, value, shape))
        case dict() if str in shape:
            return isinstance(value, dict) and all(matches_schema(item, shape[str]) for item in value.values())
        case dict():
            return isinstance(value, dict) and all(
                name in value and matches_schema(value[name], shape[name]) for name in shape
            )
    if isinstance(value, bool):
        return shape in (bool, bool | None)
    return isinstance(value, shape) and (not isinstance(value, int | float) or abs(value) <= LARGEST)
