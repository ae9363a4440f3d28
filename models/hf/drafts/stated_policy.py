"""The policy that a draft was made for, as its `config.json` states it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from models.config import DecoderConfig
from models.hf.config import config_to_hf
from models.hf.families import FAMILIES
from models.json_fields import integer, nested, texts


class StatedPolicy(NamedTuple):
    """Facts that a draft's `config.json` states about the policy that it was made for.

    Attributes:
        name: Name or path, only in speculators' files; None if unknown.
        num_layers: Number of layers, only in z-lab's and DeepSpec's; None if unknown.
        architectures: Its own `architectures`, only in speculators'; empty if unknown.
    """

    name: str | None = None
    num_layers: int | None = None
    architectures: Sequence[str] = ()


def stated_policy(policy: DecoderConfig, name: str | None = None) -> StatedPolicy:
    """Return what a draft's files state of a policy of this shape. name: name or path for serving engines."""
    try:
        architectures = config_to_hf(policy)["architectures"]
    except ValueError:  # no family has such a policy
        architectures = ()
    return StatedPolicy(name, policy.num_layers, architectures)


def check_stated_policy(fields: Mapping[str, Any], policy: DecoderConfig) -> None:
    """Raise ValueError if a draft's `config.json` states a policy of another family or number of layers."""
    if "num_target_layers" in fields and (stated := integer(fields, "num_target_layers")) != policy.num_layers:
        raise ValueError(f"num_target_layers = {stated}: must be {policy.num_layers}, the policy's number of layers")
    verifier = nested(nested(fields, "speculators_config"), "verifier")
    made_for = texts(verifier, "architectures")
    alike = [
        family.architecture
        for family in FAMILIES.values()
        if (family.qk_norm, family.qkv_bias) == (policy.qk_norm, policy.qkv_bias)
    ]
    if made_for and not set(made_for) & set(alike):
        raise ValueError(f"made for {made_for[0]} ({verifier.get('name_or_path')}), but the policy is {alike[0]}")
