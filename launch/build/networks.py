"""From a run's configuration to the networks, problems and rewards that it names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.schema import DataConfig, RunConfig
from launch.build.draft import Head, build_draft
from launch.build.draft_checkpoint import fit_draft, layers_to_read, load_draft, read_by, stated
from launch.build.draft_vocabulary import frequent_tokens
from launch.build.lookups import blank_memory, with_lookup
from launch.build.policy import build_policy
from launch.cli.errors import ConfigError
from launch.data.arithmetic import ALPHABET, arithmetic
from launch.data.problems import Problem, load_jsonl, split
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.decoder import make_policy
from specjax.drafters import Drafter
from specjax.types import Params, Policy


@dataclass(frozen=True)
class Problems:
    """Problems to train on, and others to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]


@dataclass(frozen=True)
class Networks:
    """Both networks as functions, and their parameters on the mesh.

    head:       the shape of an EAGLE-3 or MTP head, or of the small model that drafts; None for other drafters.
    draft_from: the option that names where the draft was read; None where it begins with random weights, or has none.
    made_for:   what the draft states that was read there.
    """

    decoder: DecoderConfig
    policy: Policy
    drafter: Drafter
    params: Params
    head: Head | None = None
    draft_from: str | None = None
    made_for: MadeFor | None = None


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of the checkpoint, or the built-in one."""
    if config.data.tokenizer == "bytes":
        return ByteTokenizer(config.data.instruction)
    if config.data.tokenizer == "characters":
        return CharacterTokenizer(ALPHABET, config.data.instruction)
    if config.model.path is None:
        raise ConfigError("model.path = None: must be a directory with a tokenizer, or set data.tokenizer to bytes")
    return HuggingFaceTokenizer(
        config.model.path, instruction=config.data.instruction, enable_thinking=config.data.enable_thinking
    )


def build_problems(config: RunConfig) -> Problems:
    """What the data section names: files, or the built-in task."""
    data = config.data
    if data.train is not None:
        problems = load_problems(data.train, data)
    elif (a := data.arithmetic) is not None:
        problems = arithmetic(config.seed, a.problems, a.min_terms, a.max_terms, a.max_value)
    else:
        raise ConfigError("data.train = None: must be a JSONL file of problems")
    if data.held_out is None:
        return Problems(*split(problems, data.held_out_count))
    return Problems(problems, load_problems(data.held_out, data))


def load_problems(path: str, data: DataConfig) -> list[Problem]:
    """Those of a JSONL file, read as the data section says."""
    return load_jsonl(path, data.prompt_field, data.answer_field, data.solution_field, data.answer_after)


def build_networks(config: RunConfig, mesh: Mesh, tokenizer: Tokenizer, problems: Sequence[Problem]) -> Networks:
    """The policy and the draft, each from its checkpoint or from random weights, and nothing remembered of `problems`.

    Raises ConfigError where the sections do not fit each other.
    """
    policy_key, draft_key = jax.random.split(jax.random.key(config.seed))
    draft, model, saved, ids = config.draft, config.model, None, None
    try:
        # A saved head knows which layers of the policy it reads.
        if draft.path is not None and draft.kind == "eagle3":
            saved = load_draft(Path(draft.path), mesh)
            model = replace(model, feature_layers=layers_to_read(saved, config))
        head = draft.head if saved is None else saved.config
        features = draft.kind == "eagle3" and head.use_aux_hidden_state
        decoder, weights = build_policy(model, mesh, policy_key, "model", features=features)
        if saved is not None:
            decoder = read_by(saved, model.feature_layers, decoder)
        stop_tokens = config.rollout.stop_tokens or tokenizer.stop_tokens
        _check_tokens(tokenizer, stop_tokens, decoder.vocab_size)
        policy = make_policy(decoder, model.remat)
        if saved is not None:
            saved = fit_draft(saved, config, decoder, policy.embedding(weights))
        elif draft.kind == "eagle3" and draft.vocab_size is not None:
            ids = frequent_tokens(problems, tokenizer, stop_tokens, draft.vocab_size, decoder.vocab_size)
        made = build_draft(config, saved, ids, decoder, policy, mesh, draft_key)
        made_for = stated(config, made.read_from, made.head, decoder)
        drafter = with_lookup(made.drafter, draft.lookup, policy, config.rollout)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    _check_lengths(config)
    memory = blank_memory(drafter, len(problems), config.rollout, mesh)
    params = Params(policy=weights, draft=made.params, memory=memory)
    return Networks(decoder, policy, drafter, params, made.head, made.read_from, made_for)


def _check_tokens(tokenizer: Tokenizer, stop_tokens: Sequence[int], vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(f"vocab_size = {vocab_size}: must be at least the tokenizer's, {tokenizer.vocab_size}")
    if not all(0 <= token < vocab_size for token in stop_tokens):
        raise ConfigError(f"rollout.stop_tokens = {stop_tokens}: must be within 0 .. {vocab_size - 1}")


def _check_lengths(config: RunConfig) -> None:
    if not config.draft.proposes and max(config.rollout.lengths):
        lengths = config.rollout.draft_lengths
        name, value = ("draft_lengths", lengths) if lengths else ("draft_length", config.rollout.draft_length)
        raise ConfigError(f"rollout.{name} = {value}: must be {(0,) if lengths else 0} with draft.kind none")
