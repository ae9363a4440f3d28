"""Other ways to read the same draft: if one of them is accepted much more, the draft was probably made for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from launch.build.drafts.base import Draft
from launch.build.drafts.eagle3 import Eagle3Draft
from launch.build.drafts.mtp import MTPDraft
from launch.build.networks import Networks
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import make_policy
from models.drafts.eagle3 import make_eagle3
from models.drafts.mtp import CONVENTIONS, make_mtp
from specjax.drafters import Drafter, HeadDrafter
from specjax.types import Policy

ROPE_BASES = (1e4, 5e5, 1e6)


@dataclass(frozen=True)
class Alternative:
    """The same parameters as another draft.

    Attributes:
        check:  what is read differently: feature layers, rope, vocabulary map or MTP convention.
        option: the other value, in words.
    """

    check: str
    option: str
    policy: Policy
    drafter: Drafter


def alternatives(networks: Networks) -> Iterator[Alternative]:
    """Yield the other ways to read a head; none for other kinds of drafts."""
    match networks.draft:
        case Eagle3Draft() as draft:
            yield from _eagle3(draft, networks.policy)
        case MTPDraft() as draft:
            yield from _mtp(draft, networks.policy)


def _eagle3(draft: Eagle3Draft, policy: Policy) -> Iterator[Alternative]:
    rebuilt = partial(_rebuilt, draft)
    if draft.head.use_aux_hidden_state:
        for layers in other_layers(draft.decoder):
            yield Alternative(
                "feature layers",
                f"feature_layers = {layers}",
                make_policy(replace(draft.decoder, feature_layers=layers)),
                draft.drafter,
            )
        if len(draft.decoder.feature_layers) > 1:
            count = len(draft.decoder.feature_layers)
            yield Alternative("feature layers", "the same layers, high to low", policy, _reversed(draft, count))
    for option, changes in _rope_changes(draft.head, draft.decoder):
        yield Alternative("rope", option, policy, rebuilt(make_eagle3(replace(draft.head, **changes), policy)))
    if draft.target_ids is not None:
        for option, ids in _other_maps(draft.target_ids, policy.vocab_size):
            yield Alternative("vocabulary map", option, policy, replace(_head(draft), target_ids=ids))


def _mtp(draft: MTPDraft, policy: Policy) -> Iterator[Alternative]:
    rebuilt, own = partial(_rebuilt, draft), draft.head.convention
    for convention in CONVENTIONS.values():
        # A head of its own is a parameter more.
        if convention != own and convention.own_head == own.own_head:
            head = replace(draft.head, convention=convention)
            yield Alternative("MTP convention", convention.name, policy, rebuilt(make_mtp(head, policy)))
    for theta in ROPE_BASES:
        if theta != draft.head.rope_theta:
            head = replace(draft.head, rope_theta=theta)
            yield Alternative("rope", f"rope_theta = {theta:g}", policy, rebuilt(make_mtp(head, policy)))


def other_layers(decoder: DecoderConfig) -> list[tuple[int, ...]]:
    """Return EAGLE-3's layers and the neighbours of the policy's, without the policy's own."""
    own, count = decoder.feature_layers, decoder.num_layers
    usual = [eagle3_feature_layers(count)] if count >= 7 and len(own) == 3 else []
    moved = [tuple(layer + step for layer in own) for step in (-1, 1)]
    found = [layers for layers in [*usual, *moved] if 0 <= layers[0] and layers[-1] < count and layers != own]
    return list(dict.fromkeys(found))


def _rope_changes(head: Any, decoder: DecoderConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for theta in sorted({*ROPE_BASES, decoder.rope_theta} - {head.rope_theta}):
        yield f"rope_theta = {theta:g}", {"rope_theta": theta}
    if head.rope_scaling != decoder.rope_scaling:
        yield f"rope_scaling = {decoder.rope_scaling}, the policy's", {"rope_scaling": decoder.rope_scaling}
    elif head.rope_scaling is not None:
        yield "rope_scaling = None", {"rope_scaling": None}


def _other_maps(ids: np.ndarray, vocab_size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the usual mistakes: no map at all, and offsets taken for ids or ids for offsets."""
    own = np.arange(len(ids), dtype=np.int32)
    found = {"the first tokens of the vocabulary": own, "ids read as offsets": ids + own}
    found["offsets read as ids"] = ids - own
    for option, other in found.items():
        if not np.array_equal(other, ids) and other.min() >= 0 and other.max() < vocab_size:
            yield option, other.astype(np.int32)


def _head(draft: Draft) -> HeadDrafter:
    assert isinstance(draft.drafter, HeadDrafter)
    return draft.drafter


def _rebuilt(draft: Draft, drafter: HeadDrafter) -> HeadDrafter:
    """Return the draft's drafter with the head of another."""
    return replace(_head(draft), head=drafter.head)


def _reversed(draft: Eagle3Draft, count: int) -> HeadDrafter:
    drafter = _head(draft)

    def features(output: Any) -> Array:
        return jnp.concatenate(jnp.split(output.features, count, axis=-1)[::-1], axis=-1)

    return replace(drafter, head=replace(drafter.head, features=features))
