"""Other ways to read the same draft. If one is accepted much more often, the draft was probably trained that way."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from launch.setup.drafts.base import Draft
from launch.setup.drafts.eagle3 import Eagle3Draft
from launch.setup.drafts.mtp import MTPDraft
from launch.setup.networks import Networks
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import make_policy
from models.drafts.eagle3 import make_eagle3
from models.drafts.mtp import CONVENTIONS, make_mtp
from specjax.drafters import Drafter, HeadDrafter
from specjax.types import Policy

ROPE_BASES = (1e4, 5e5, 1e6)


@dataclass(frozen=True)
class DraftVariant:
    """The draft's parameters with one option changed.

    Attributes:
        check:   what is changed: feature layers, rope, vocabulary map or MTP convention.
        option:  the changed option and its value, in words.
        policy:  policy to use with it.
        drafter: drafter to use with it.
    """

    check: str
    option: str
    policy: Policy
    drafter: Drafter


def alternatives(networks: Networks) -> Iterator[DraftVariant]:
    """Yield other ways to read an EAGLE-3 or MTP head; none for other kinds of drafts."""
    match networks.draft:
        case Eagle3Draft() as draft:
            yield from _eagle3(draft, networks.policy)
        case MTPDraft() as draft:
            yield from _mtp(draft, networks.policy)


def _eagle3(draft: Eagle3Draft, policy: Policy) -> Iterator[DraftVariant]:
    rebuilt = partial(_rebuilt, draft)
    if draft.head.use_aux_hidden_state:
        for layers in other_layers(draft.decoder):
            yield DraftVariant(
                "feature layers",
                f"feature_layers = {layers}",
                make_policy(replace(draft.decoder, feature_layers=layers)),
                draft.drafter,
            )
        if len(draft.decoder.feature_layers) > 1:
            count = len(draft.decoder.feature_layers)
            yield DraftVariant("feature layers", "the same layers, high to low", policy, _reversed(draft, count))
    for option, changes in _rope_changes(draft.head, draft.decoder):
        yield DraftVariant("rope", option, policy, rebuilt(make_eagle3(replace(draft.head, **changes), policy)))
    if draft.target_ids is not None:
        for option, ids in _other_maps(draft.target_ids, policy.vocab_size):
            yield DraftVariant("vocabulary map", option, policy, replace(_head(draft), target_ids=ids))


def _mtp(draft: MTPDraft, policy: Policy) -> Iterator[DraftVariant]:
    rebuilt, current = partial(_rebuilt, draft), draft.head.convention
    for convention in CONVENTIONS.values():
        # `own_head` adds a parameter, so both must agree on it.
        if convention != current and convention.own_head == current.own_head:
            head = replace(draft.head, convention=convention)
            yield DraftVariant("MTP convention", convention.name, policy, rebuilt(make_mtp(head, policy)))
    for theta in ROPE_BASES:
        if theta != draft.head.rope_theta:
            head = replace(draft.head, rope_theta=theta)
            yield DraftVariant("rope", f"rope_theta = {theta:g}", policy, rebuilt(make_mtp(head, policy)))


def other_layers(decoder: DecoderConfig) -> list[tuple[int, ...]]:
    """Return other feature layers to try: EAGLE-3's usual ones, and the current ones moved by one layer."""
    current, count = decoder.feature_layers, decoder.num_layers
    usual = [eagle3_feature_layers(count)] if count >= 7 and len(current) == 3 else []
    moved = [tuple(layer + step for layer in current) for step in (-1, 1)]
    valid = [layers for layers in [*usual, *moved] if 0 <= layers[0] and layers[-1] < count and layers != current]
    return list(dict.fromkeys(valid))


def _rope_changes(head: Any, decoder: DecoderConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for theta in sorted({*ROPE_BASES, decoder.rope_theta} - {head.rope_theta}):
        yield f"rope_theta = {theta:g}", {"rope_theta": theta}
    if head.rope_scaling != decoder.rope_scaling:
        yield f"rope_scaling = {decoder.rope_scaling}, the policy's", {"rope_scaling": decoder.rope_scaling}
    elif head.rope_scaling is not None:
        yield "rope_scaling = None", {"rope_scaling": None}


def _other_maps(ids: np.ndarray, vocab_size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the maps of usual mistakes: no map at all, and offsets confused with ids."""
    first_ids = np.arange(len(ids), dtype=np.int32)
    maps = {"the first tokens of the vocabulary": first_ids, "ids read as offsets": ids + first_ids}
    maps["offsets read as ids"] = ids - first_ids
    for option, other in maps.items():
        if not np.array_equal(other, ids) and other.min() >= 0 and other.max() < vocab_size:
            yield option, other.astype(np.int32)


def _head(draft: Draft) -> HeadDrafter:
    assert isinstance(draft.drafter, HeadDrafter)
    return draft.drafter


def _rebuilt(draft: Draft, drafter: HeadDrafter) -> HeadDrafter:
    """Return the draft's drafter with the head of `drafter`."""
    return replace(_head(draft), head=drafter.head)


def _reversed(draft: Eagle3Draft, count: int) -> HeadDrafter:
    drafter = _head(draft)

    def features(output: Any) -> Array:
        return jnp.concatenate(jnp.split(output.features, count, axis=-1)[::-1], axis=-1)

    return replace(drafter, head=replace(drafter.head, features=features))
