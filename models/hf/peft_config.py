"""Conversion between PEFT's `adapter_config.json`, as versions up to 0.21 write it, and the layers with adapters.

No field is dropped silently. Each is read, checked against the values that are implemented, known not to change the
policy, or refused. Modules have transformers' names, such as `model.layers.0.self_attn.q_proj`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from models.files import errors_name, one_line_errors, optional
from models.json_fields import boolean, check, integer, nested, number, one_of, refuse_unknown, show, texts
from models.lora import MOST_ALPHA, Adapted

T = TypeVar("T")

# PEFT's defaults of r and of lora_alpha.
_RANK, _ALPHA = 8, 8
# Files of PEFT have a pattern for a module at most, and expressions of some hundred characters.
_MOST_PATTERNS, _LONGEST_PATTERN = 10_000, 10_000
# What Python and RE2 read differently: a repetition without its least number, and the start of a POSIX class.
_OTHERWISE = ("{,", "[:")
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
    unknown field, or a target that no layer matches. Raises ImportError without pyarrow if it has regular expressions.
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
    modules = _targets(fields, layers)
    ranks = _by_module("rank_pattern", ranks, modules, rank)
    alphas = _by_module("alpha_pattern", alphas, modules, alpha)
    return {m: layers[m]._replace(rank=ranks[m], alpha=alphas[m], rslora=rslora) for m in modules}


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
    targets, excluded = (_named(fields, name, list(layers)) for name in ("target_modules", "exclude_modules"))
    may = f"must be of {', '.join(sorted({_end(module) for module in layers}))}, the layers that may have an adapter"
    for text, modules in targets.items():
        if not modules:
            raise ValueError(f"target_modules = {show(text)}: matches no layer; {may}")
    found = set[str]().union(*targets.values()).difference(*excluded.values())
    if not found:
        raise ValueError(f"target_modules = {show(fields.get('target_modules'))}: leaves no layer; {may}")
    return [module for module in layers if module in found]


def _named(fields: Mapping[str, Any], name: str, modules: list[str]) -> dict[str, set[str]]:
    """Return the modules that each text of a field names: a regular expression, or a list of ends of names."""
    value = fields.get(name)
    if isinstance(value, str):
        return {value: set(modules) if value.lower() == "all-linear" else _matching(name, value, value, modules)}
    by_end: dict[str, set[str]] = {}
    for module in modules:
        parts = module.split(".")
        for i in range(len(parts)):
            by_end.setdefault(".".join(parts[i:]), set()).add(module)
    return {text: by_end.get(text, set()) for text in texts(fields, name)}


def _by_module(field: str, patterns: Mapping[str, T], modules: list[str], default: T) -> dict[str, T]:
    """Return for each module the value of the first pattern that matches the end of its name, as in PEFT."""
    if len(patterns) > _MOST_PATTERNS:
        raise ValueError(f"{field}: has {len(patterns)} patterns; must have at most {_MOST_PATTERNS}")
    values = dict[str, T]()
    for pattern, value in patterns.items():
        for module in _matching(field, pattern, rf"(.*\.)?({pattern})", modules):
            values.setdefault(module, value)
    return {module: values.get(module, default) for module in modules}


def _matching(field: str, text: str, expression: str, modules: list[str]) -> set[str]:
    """Return the modules that an expression around the regular expression `text` matches from end to end.

    The file is a stranger's. RE2 takes time linear in expression and name, where Python's `re` may never end.
    """
    arrow, compute = optional("pyarrow"), optional("pyarrow.compute")
    must = "must be a regular expression that RE2 knows, or a list of modules: targeted_module_names of peft's model"
    with one_line_errors(f"{field} = {show(text)}: {must}"):
        names = arrow.array(modules, arrow.string())
        if len(text) > _LONGEST_PATTERN:
            raise ValueError(f"has {len(text)} characters, more than {_LONGEST_PATTERN}")
        if other := next((other for other in _OTHERWISE if other in text), None):
            raise ValueError(f"{other} means something else in Python")
        compute.match_substring_regex(names, text)  # by itself: it must close what it opens
        found = compute.match_substring_regex(names, rf"\A(?:{expression})\z").to_pylist()
    return {module for module, matches in zip(modules, found, strict=True) if matches}


def _alpha(fields: Mapping[str, Any], name: str) -> float:
    if (alpha := number(fields, name)) > MOST_ALPHA:
        raise ValueError(f"{name} = {alpha}: must be at most {MOST_ALPHA:.0f}")
    return alpha


def _end(module: str) -> str:
    return module.rpartition(".")[2]


def _as_number(alpha: float) -> float | int:
    """Return an integer where there is one: other readers declare `lora_alpha` so."""
    return int(alpha) if alpha == int(alpha) else alpha
