"""The rotary embedding in Hugging Face's `config.json`, as transformers 4 (`rope_scaling`) and 5 (`rope_parameters`)
write it.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from models.files import errors_name
from models.json_fields import boolean, check, either, integer, number, refuse_unknown, show
from models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ROPE_FIELDS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LENGTH = "original_max_position_embeddings"
_READERS: dict[Any, Callable[..., Any]] = {int: integer, float: number, float | None: number, bool: boolean}
# Hugging Face's fields have the names of ours.
_KINDS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the scaling; transformers 5 keeps both in one object, 4 kept the base outside.

    Raises ValueError naming the field for a type that is not implemented, a missing, impossible or unknown field.
    """
    outer, rope = either(config, "rope_parameters", "rope_scaling")
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise ValueError(f"{outer} = {show(rope)}: must be an object")
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
    """The fields that say it, in the words of transformers 4, which 5 reads too."""
    said = None
    if scaling is not None:
        own = {name: value for name, value in asdict(scaling).items() if value is not None}
        said = {"rope_type": next(name for name, kind in _KINDS.items() if isinstance(scaling, kind)), **own}
    return {"rope_scaling": said, "rope_theta": theta}


def _scaling(kind: type[RopeScaling], outer: str, rope: Mapping[str, Any], length: int | None) -> RopeScaling:
    """Return the scaling of this kind that the object `rope` describes; what is missing or null has its default.

    length: the model's, which YaRN's original length defaults to.
    """
    given = {_LENGTH: length} if kind is YarnScaling else {}
    given |= {name: value for name, value in rope.items() if value is not None}
    values = {}
    for field in fields(kind):
        if field.name in given or field.default is MISSING:
            name, read = f"{outer}.{field.name}", _READERS[field.type]
            values[field.name] = read({name: given.get(field.name)}, name)
    with errors_name(outer):
        return kind(**values)
