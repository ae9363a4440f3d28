"""Construction of the policy and the draft of a run, with their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.console import console
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError, as_config_error
from launch.setup.adapters import base_of, build_adapters, other_base
from launch.setup.draft import build_draft
from launch.setup.drafts.base import Draft, DraftContext
from launch.setup.drafts.saved_head import read_head
from launch.setup.lookups import abstract_memory, blank_memory, with_lookup
from launch.setup.policy import build_policy
from models.config import DecoderConfig
from specjax.checkpoint_integrity import fingerprint
from specjax.drafters import Drafter, NoDrafter
from specjax.short_repr import short_repr
from specjax.types import Params, Policy, PyTree
from specjax.vocabulary import with_tokens


@dataclass(frozen=True, eq=False)
class Networks:
    """Policy and draft as functions, and their parameters on the mesh.

    Attributes:
        decoder: config of the policy's decoder; None if model.family names a user function.
        policy:  the policy's functions; ids that have no token of the tokenizer's have probability 0.
        drafter: the drafter of `draft`, combined with a lookup if the run has one.
        params:  parameters of policy and draft, and the drafter's memory. With `lora`, `policy` has the adapters and
                 `base` the frozen weights.
        draft:   the draft, as its builder returned it.
        base_hash: hash of the frozen weights; None without.
    """

    decoder: DecoderConfig | None
    policy: Policy
    drafter: Drafter
    params: Params
    draft: Draft = Draft(NoDrafter())
    base_hash: str | None = None

    __repr__ = short_repr


def build_networks(
    config: RunConfig, mesh: Mesh, tokenizer: Tokenizer, problems: Sequence[Problem], *, shapes: bool = False
) -> Networks:
    """Build policy and draft, each from its checkpoint or with random weights. The drafter's memory starts empty.

    problems: training problems.
    shapes:   build the parameters as ShapeDtypeStructs with shardings. The devices may be absent, and only the
              `config.json` of a checkpoint is read.

    Raises ConfigError if sections of the config contradict each other.
    """
    policy_key, draft_key = (None, None) if shapes else jax.random.split(jax.random.key(config.seed))
    try:
        # The head comes first: it determines which layers the policy returns as features.
        saved = read_head(config, mesh, shapes=shapes)
        policy, weights, decoder = build_policy(config, saved, mesh, policy_key)
        if not shapes:
            _check_tokens(tokenizer, policy.vocab_size)
            policy = with_tokens(policy, tokenizer.token_ids())
        context = DraftContext(config, policy, weights, decoder, mesh, draft_key, problems, tokenizer, saved)
        draft = build_draft(context)
        drafter = with_lookup(draft.drafter, config.draft.lookup, policy, config.rollout)
        base: PyTree = ()
        if config.lora.enabled and decoder is not None:
            lora_key = None if policy_key is None else jax.random.fold_in(policy_key, 1)
            weights, base = build_adapters(config.lora, decoder, weights, mesh, lora_key)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    with as_config_error():
        if shapes:
            memory = abstract_memory(drafter, len(problems), config.rollout, mesh)
        else:
            memory = blank_memory(drafter, len(problems), config.draft.lookup.kept, config.rollout, mesh)
    base_hash = fingerprint(base) if base and not shapes else None
    if config.lora.path is not None and decoder is not None and base_hash is not None:
        with as_config_error():
            if (line := other_base(config.lora.path, base_of(config, decoder, base_hash))) is not None:
                console.print(line)
    return Networks(decoder, policy, drafter, Params(weights, draft.params, memory, base), draft, base_hash)


def _check_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"vocab_size = {vocab_size}: must be at least {tokenizer.vocab_size}, the tokenizer's vocabulary"
        )
    if not all(0 <= token < vocab_size for token in tokenizer.stop_tokens):
        raise ConfigError(f"rollout.stop_tokens = {tokenizer.stop_tokens}: must be within 0 .. {vocab_size - 1}")
