"""Check of options that take one of a few words."""

from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints


def check_choices(config: object) -> None:
    """Raise ValueError for the first dataclass field whose value its `Literal` does not list.

    In a field whose type is a union of a `Literal` and something else, only strings are checked.
    """
    for name, hint in get_type_hints(type(config)).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        value = getattr(config, name)
        if words and value not in words and (len(kinds) == 1 or isinstance(value, str)):
            raise ValueError(f"{name} = {value}: must be one of {', '.join(words)}")
