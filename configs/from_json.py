"""Read a configuration back from the JSON of `dataclasses.asdict`."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from configs.schema import KINDS, DraftConfig, kind_of
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


def without_idle_options(run: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a run without options that the kind of its draft does not read, which older runs may hold."""
    draft = run.get("draft")
    if not isinstance(draft, dict):
        return run
    idle = {option for kind in KINDS.values() for option in kind.options}
    idle -= {*kind_of(str(draft.get("kind", DraftConfig.kind))).options}
    kept = {name: value for name, value in draft.items() if name not in idle}
    if isinstance(head := draft.get("head"), dict):
        kept["head"] = {name: value for name, value in head.items() if f"head.{name}" not in idle}
    return run | {"draft": kept}
