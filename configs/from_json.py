"""Read a configuration back from the JSON of `dataclasses.asdict`."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from specjax.options import alternatives


def from_json(kind: Any, value: Any) -> Any:
    """Return the value of this type that JSON holds: a dataclass for an object, a tuple for a list.

    Of several dataclasses it is the smallest with all the fields. A field that JSON lacks has its default. Raises
    ValueError with the message `path.to.field: ..` for a field that the type lacks.
    """
    if isinstance(value, list):
        return tuple(from_json(Any, each) for each in value)
    sections: list[Any] = [each for each in alternatives(kind) if is_dataclass(each)]
    if not isinstance(value, dict) or not sections:
        return value
    names = {each: {field.name for field in fields(each)} for each in sections}
    section = min(sections, key=lambda each: (len(value.keys() - names[each]), len(names[each])))
    hints, read = get_type_hints(section), dict[str, Any]()
    for name, each in value.items():
        if name not in names[section]:
            raise ValueError(
                f"{name}: is not an option of this version; give a recipe as CONFIG, and the run as --checkpoint"
            )
        try:
            read[name] = from_json(hints[name], each)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error
    return section(**read)
