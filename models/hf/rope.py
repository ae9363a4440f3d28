"""Rotary embedding fields of Hugging Face's `config.json`: `rope_scaling` (transformers 4), `rope_parameters` (5)."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

from models.files import errors_name
from models.json_fields import boolean, check, either, integer, nested, number, refuse_unknown
from models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ROPE_FIELDS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LENGTH = "original_max_position_embeddings"
_READERS: dict[Any, Callable[..., Any]] = {int: integer, float: number, float | None: number, bool: boolean}
# Our dataclass fields have Hugging Face's names.
_KINDS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling. transformers 5 keeps both in one object, 4 keeps the base outside it.

    Raises ValueError naming the field: for a type that is not implemented, or a missing, invalid or unknown field.
    """
    outer, rope = either(config, "rope_parameters", "rope_scaling")
    rope = nested({outer: rope}, outer)
    inner = {f"{outer}.{key}": value for key, value in rope.items()}
    theta_name, theta = either({**config, **inner}, f"{outer}.rope_theta", "rope_theta")
    theta = 10_000.0 if theta is None else number({theta_name: theta}, theta_name)
    kind_name, kind = either(inner, f"{outer}.rope_type", f"{outer}.type")
    kind = "default" if kind is None else kind
    check(kind_name, kind, ("default", *_KINDS))
    check(f"{outer}.partial_rotary_factor", rope.get("partial_rotary_factor"), (None, 1))
    if kind == "default":
        refuse_unknown(rope, _COMMON, f"{outer}.")
        return theta, None
    refuse_unknown(rope, _COMMON | {field.name for field in fields(_KINDS[kind])}, f"{outer}.")
    return theta, _scaling(_KINDS[kind], outer, rope, config.get("max_position_embeddings"))


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the fields for a base and a scaling, in the format of transformers 4, which 5 reads too."""
    stored = None
    if scaling is not None:
        values = {name: value for name, value in asdict(scaling).items() if value is not None}
        stored = {"rope_type": next(name for name, kind in _KINDS.items() if isinstance(scaling, kind)), **values}
    return {"rope_scaling": stored, "rope_theta": theta}


def _scaling(kind: type[RopeScaling], outer: str, rope: Mapping[str, Any], length: int | None) -> RopeScaling:
    """Return the scaling of this kind that the object `rope` describes. Missing and null fields take their defaults.

    length: maximal length of the model, the default of YaRN's original length.
    """
    settings = {_LENGTH: length} if kind is YarnScaling else {}
    settings |= {name: value for name, value in rope.items() if value is not None}
    values, types = {}, get_type_hints(kind)
    for field in fields(kind):
        if field.name in settings or field.default is MISSING:
            name, reader = f"{outer}.{field.name}", _READERS[types[field.name]]
            values[field.name] = reader({name: settings.get(field.name)}, name)
    with errors_name(outer):
        return kind(**values)
