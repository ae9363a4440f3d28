"""Sliding-window fields of Hugging Face's `config.json`: the layers with a window, and its size."""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf.families import Family
from models.json_fields import check, integer, one_of, show, texts

_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows_from_hf(
    fields: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return `sliding_window` and `sliding_layers` of the decoder. Raises ValueError naming an invalid field."""
    if family.windows == "each" and "sliding_window" not in fields:
        raise ValueError("sliding_window: missing; must be null or a positive integer")
    switch = (False, True) if family.windows == "any" else (False,)
    used = one_of({"use_sliding_window": False, **fields}, "use_sliding_window", switch) or family.windows == "each"
    used = used and fields.get("sliding_window") is not None
    allowed = ((_SLIDING,) if family.windows == "each" else (_FULL, _SLIDING)) if used else (_FULL,)
    kinds = texts(fields, "layer_types")
    for kind in kinds:
        check("layer_types", kind, allowed)
    if not used:
        return None, None
    window = integer(fields, "sliding_window")
    if kinds and len(kinds) != num_layers:
        raise ValueError(f"layer_types = {show(kinds)}: must name num_hidden_layers = {num_layers} layers")
    if kinds or family.windows == "each":
        sliding_layers = tuple(i for i, kind in enumerate(kinds or (_SLIDING,) * num_layers) if kind == _SLIDING)
    else:
        first_sliding = fields.get("max_window_layers")
        if not isinstance(first_sliding, int) or isinstance(first_sliding, bool) or first_sliding < 0:
            value = show(first_sliding)
            raise ValueError(f"max_window_layers = {value}: must be the first layer with a sliding window")
        sliding_layers = tuple(range(first_sliding, num_layers))
    if not sliding_layers:
        return None, None
    return window, None if len(sliding_layers) == num_layers else sliding_layers


def has_windows(family: Family, config: DecoderConfig) -> bool:
    """Return whether the family's config.json can state the decoder's windows."""
    match family.windows:
        case "none":
            return not any(config.windows)
        case "each":
            return len(set(config.windows)) == 1
        case "any":
            return True


def windows_to_hf(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that state the decoder's windows, as transformers 4 and 5 read them for this family."""
    if not any(config.windows):
        return {}
    if family.windows == "each":
        return {"sliding_window": config.sliding_window}
    sliding_layers = [i for i, window in enumerate(config.windows) if window]
    fields: dict[str, Any] = {
        "layer_types": [_SLIDING if window else _FULL for window in config.windows],
        "sliding_window": config.sliding_window,
        "use_sliding_window": True,
    }
    # Versions of transformers without layer_types only know the first layer with a window.
    if sliding_layers == list(range(sliding_layers[0], config.num_layers)):
        fields["max_window_layers"] = sliding_layers[0]
    return fields
