"""The rotary embedding in Hugging Face's `config.json`, as transformers 4 (`rope_scaling`) and 5 (`rope_parameters`)
write it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from models.json_fields import check, either, integer, number, refuse_unknown, show
from models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ROPE_FIELDS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LENGTH = "original_max_position_embeddings"
_OWN: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": (
        *("factor", _LENGTH, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_KINDS = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


def rope_from_hf(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the scaling; transformers 5 keeps both in one object, 4 kept the base outside.

    Raises ValueError naming the field for a type that is not implemented, a missing, impossible or unknown field.
    """
    outer, rope = either(fields, "rope_parameters", "rope_scaling")
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise ValueError(f"{outer} = {show(rope)}: must be an object")
    inner = {f"{outer}.{key}": value for key, value in rope.items()}
    theta_name, theta = either({**fields, **inner}, f"{outer}.rope_theta", "rope_theta")
    theta = 10_000.0 if theta is None else number({theta_name: theta}, theta_name)
    kind_name, kind = either(inner, f"{outer}.rope_type", f"{outer}.type")
    kind = "default" if kind is None else kind
    check(kind_name, kind, tuple(_OWN))
    check(f"{outer}.partial_rotary_factor", rope.get("partial_rotary_factor"), (None, 1))
    refuse_unknown(rope, _COMMON | set(_OWN[kind]), f"{outer}.")
    return theta, _scaling(kind, outer, inner, fields)


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields that say it, in the words of transformers 4, which 5 reads too."""
    said = None
    if scaling is not None:
        own = {name: value for name, value in asdict(scaling).items() if value is not None}
        said = {"rope_type": _KINDS[type(scaling)], **own}
    return {"rope_scaling": said, "rope_theta": theta}


def _scaling(kind: str, outer: str, inner: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeScaling | None:
    def real(key: str) -> float:
        return number(inner, f"{outer}.{key}")

    def optional(key: str) -> float | None:
        return None if inner.get(f"{outer}.{key}") is None else real(key)

    match kind:
        case "linear":
            return LinearScaling(real("factor"))
        case "llama3":
            factor, low, high = real("factor"), real("low_freq_factor"), real("high_freq_factor")
            if high <= low:
                raise ValueError(f"{outer}.high_freq_factor = {high}: must be above {outer}.low_freq_factor = {low}")
            return Llama3Scaling(factor, low, high, integer(inner, f"{outer}.{_LENGTH}"))
        case "yarn":
            # transformers' defaults.
            fast, slow = optional("beta_fast") or 32.0, optional("beta_slow") or 1.0
            if fast < slow:
                raise ValueError(f"{outer}.beta_fast = {fast}: must be at least {outer}.beta_slow = {slow}")
            truncate = inner.get(f"{outer}.truncate", True)
            check(f"{outer}.truncate", truncate, (True, False))
            return YarnScaling(
                factor=real("factor"),
                original_max_position_embeddings=integer(
                    inner, f"{outer}.{_LENGTH}", default=integer(fields, "max_position_embeddings")
                ),
                beta_fast=fast,
                beta_slow=slow,
                attention_factor=optional("attention_factor"),
                mscale=optional("mscale"),
                mscale_all_dim=optional("mscale_all_dim"),
                truncate=truncate,
            )
    return None
