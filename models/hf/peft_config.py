"""Conversion between PEFT's `adapter_config.json`, as versions up to 0.21 write it, and the layers with adapters.

No field is dropped silently. Each is read, checked against the values that are implemented, known not to change the
policy, or refused. Modules have transformers' names, such as `model.layers.0.self_attn.q_proj`.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from models.files import errors_name, one_line_errors
from models.json_fields import boolean, check, integer, nested, number, one_of, refuse_unknown, show, texts
from models.lora import MOST_ALPHA, Adapted

T = TypeVar("T")

# PEFT's defaults of r and of lora_alpha.
_RANK, _ALPHA = 8, 8
# Fields of which only these values are implemented. Other values of `init_lora_weights` change the base.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "ensure_weight_tying": (False,),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "layers_to_transform": (None, []),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "peft_type": ("LORA",),
    "target_parameters": (None, []),
    "task_type": ("CAUSAL_LM", None),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (None,),
}
_READ = frozenset({
    "alpha_pattern", "exclude_modules", "lora_alpha", "r", "rank_pattern", "target_modules", "use_rslora",
})  # fmt: skip
# Book-keeping, how PEFT trains, and parts of options that are refused. None of them changes the policy.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "layers_pattern",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision",
})  # fmt: skip


def layers_from_peft(fields: Mapping[str, Any], layers: Mapping[str, Adapted]) -> dict[str, Adapted]:
    """Return the layers with adapters that an `adapter_config.json` describes, by module.

    layers: all that may have an adapter, by module, with any rank.

    Raises a one-line ValueError with the field, its value and what is allowed: for a value that is not implemented, an
    unknown field, or a target that no layer matches.
    """
    one_of(fields, "peft_type", _ALLOWED["peft_type"])
    for name, allowed in _ALLOWED.items():
        if name in fields:
            check(name, fields[name], allowed)
    refuse_unknown(fields, _READ | _IGNORED | set(_ALLOWED))
    rank, rslora = integer(fields, "r", _RANK), boolean(fields, "use_rslora")
    alpha = _alpha({"lora_alpha": _ALPHA, **fields}, "lora_alpha")
    ranks, alphas = nested(fields, "rank_pattern"), nested(fields, "alpha_pattern")
    with errors_name("rank_pattern"):
        ranks = {pattern: integer(ranks, pattern) for pattern in ranks}
    with errors_name("alpha_pattern"):
        alphas = {pattern: _alpha(alphas, pattern) for pattern in alphas}
    return {
        module: layers[module]._replace(
            rank=_by_pattern("rank_pattern", ranks, module, rank),
            alpha=_by_pattern("alpha_pattern", alphas, module, alpha),
            rslora=rslora,
        )
        for module in _targets(fields, layers)
    }


def layers_to_peft(
    layers: Mapping[str, Adapted], modules: Collection[str], base: str | None, revision: str | None
) -> dict[str, Any]:
    """Return the fields of an `adapter_config.json`.

    layers: those with adapters, by module. modules: all of the policy.
    base, revision: name or path of the weights that the adapters belong to, and their revision on the hub.
    """
    ends = {_end(module) for module in layers}
    by_end = {module for module in modules if _end(module) in ends} == layers.keys()
    ranks = {module: layer.rank for module, layer in layers.items()}
    alphas = {module: _as_number(layer.alpha) for module, layer in layers.items()}
    (rank, _), (alpha, _) = (Counter(each.values()).most_common(1)[0] for each in (ranks, alphas))
    return {
        "alpha_pattern": {module: other for module, other in alphas.items() if other != alpha},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        "revision": revision,
        "target_modules": sorted(ends if by_end else layers),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": next(iter(layers.values())).rslora,
    }


def _targets(fields: Mapping[str, Any], layers: Mapping[str, Adapted]) -> list[str]:
    """Return the modules that `target_modules` and `exclude_modules` leave, in the order of `layers`."""
    targets, excluded = _expressions(fields, "target_modules"), _expressions(fields, "exclude_modules").values()
    may = f"must be of {', '.join(sorted({_end(module) for module in layers}))}, the layers that may have an adapter"
    for text, target in targets.items():
        if not any(map(target.fullmatch, layers)):
            raise ValueError(f"target_modules = {show(text)}: matches no layer; {may}")
    found = [module for module in layers if any(target.fullmatch(module) for target in targets.values())]
    found = [module for module in found if not any(each.fullmatch(module) for each in excluded)]
    if not found:
        raise ValueError(f"target_modules = {show(fields.get('target_modules'))}: leaves no layer; {may}")
    return found


def _expressions(fields: Mapping[str, Any], name: str) -> dict[str, re.Pattern[str]]:
    """Return a regular expression of module names for each text of a field: one, or a list of ends of names."""
    value = fields.get(name)
    if isinstance(value, str):
        return {value: _compiled(name, value, ".*" if value.lower() == "all-linear" else value)}
    return {text: re.compile(rf"(.*\.)?{re.escape(text)}") for text in texts(fields, name)}


def _by_pattern(field: str, patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT's `get_pattern_key`."""
    for pattern, value in patterns.items():
        if _compiled(field, pattern, rf"(.*\.)?({pattern})$").match(module):
            return value
    return default


def _compiled(field: str, text: str, expression: str) -> re.Pattern[str]:
    with one_line_errors(f"{field} = {show(text)}: must be a regular expression"):
        return re.compile(expression)


def _alpha(fields: Mapping[str, Any], name: str) -> float:
    if (alpha := number(fields, name)) > MOST_ALPHA:
        raise ValueError(f"{name} = {alpha}: must be at most {MOST_ALPHA:.0f}")
    return alpha


def _end(module: str) -> str:
    return module.rpartition(".")[2]


def _as_number(alpha: float) -> float | int:
    """Return an integer where there is one: other readers declare `lora_alpha` so."""
    return int(alpha) if alpha == int(alpha) else alpha
