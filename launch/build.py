"""From a run's configuration to the networks, problems and rewards that it names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import DataConfig, DraftConfig, ModelConfig, RunConfig
from launch.arithmetic import ALPHABET, arithmetic
from launch.build_draft import fit_draft, fresh_draft, layers_to_read, load_draft
from launch.build_mtp import build_mtp
from launch.data import Problem, load_jsonl, split
from launch.errors import ConfigError
from launch.lookups import blank_memory, with_lookup
from launch.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import init_decoder, make_policy
from models.eagle3 import Eagle3Config, make_eagle3
from models.hf_config import read_hf_config
from models.hf_import import load_policy
from models.params import init_params
from models.policy_checkpoint import load_policy_checkpoint
from specjax.drafters import Drafter, HeadDrafter, ModelDrafter, NoDrafter
from specjax.types import Params, Policy, PyTree


@dataclass(frozen=True)
class Problems:
    """Problems to train on, and others to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]


@dataclass(frozen=True)
class Networks:
    """Both networks as functions, and their parameters on the mesh.

    head: the shape of an EAGLE-3 head, or of the small model that drafts; None for other drafters.
    """

    decoder: DecoderConfig
    policy: Policy
    drafter: Drafter
    params: Params
    head: Eagle3Config | DecoderConfig | None = None


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
        problems = _load(data.train, data)
    elif (a := data.arithmetic) is not None:
        problems = arithmetic(config.seed, a.problems, a.min_terms, a.max_terms, a.max_value)
    else:
        raise ConfigError("data.train = None: must be a JSONL file of problems")
    if data.held_out is None:
        return Problems(*split(problems, data.held_out_count))
    return Problems(problems, _load(data.held_out, data))


def _load(path: str, data: DataConfig) -> list[Problem]:
    return load_jsonl(path, data.prompt_field, data.answer_field, data.solution_field, data.answer_after)


def build_networks(config: RunConfig, mesh: Mesh, tokenizer: Tokenizer, problems: Sequence[Problem]) -> Networks:
    """The policy and the draft, each from its checkpoint or from random weights, and nothing remembered of `problems`.

    Raises ConfigError where the sections do not fit each other.
    """
    policy_key, draft_key = jax.random.split(jax.random.key(config.seed))
    try:
        model, saved = config.model, None
        if config.draft.path is not None and config.draft.kind != "model":
            saved = load_draft(Path(config.draft.path), mesh)
            model = replace(model, feature_layers=layers_to_read(saved, config))
        made = config.draft.head if saved is None else saved.config
        features = config.draft.kind == "eagle3" and made.use_aux_hidden_state
        decoder, weights = _policy(model, mesh, policy_key, "model", features=features)
        if tokenizer.vocab_size > decoder.vocab_size:
            raise ConfigError(
                f"vocab_size = {decoder.vocab_size}: must be at least the tokenizer's, {tokenizer.vocab_size}"
            )
        policy = make_policy(decoder)
        stop_tokens = config.rollout.stop_tokens or tokenizer.stop_tokens
        if not all(0 <= token < decoder.vocab_size for token in stop_tokens):
            raise ConfigError(f"rollout.stop_tokens = {stop_tokens}: must be within 0 .. {decoder.vocab_size - 1}")
        drafter, head, draft = NoDrafter(), None, {}
        if saved is not None:
            saved = fit_draft(saved, config, decoder, policy.embedding(weights))
        elif config.draft.kind == "mtp":
            drafter, draft = build_mtp(config, decoder, policy, mesh, draft_key)
        elif config.draft.kind == "eagle3":
            ids, count = None, config.draft.vocab_size
            if count is not None:
                ids = frequent_tokens(problems, tokenizer, stop_tokens, count, decoder.vocab_size)
            saved = fresh_draft(config.draft, decoder, mesh, draft_key, ids)
        if saved is not None:
            head, draft = saved.config, saved.params
            drafter = make_eagle3(head, policy, saved.target_ids)
        if isinstance(drafter, HeadDrafter):
            how = config.draft
            drafter = replace(drafter, unroll=how.unroll, decay=how.decay, objective=how.loss)
        if config.draft.kind == "model":
            drafter, head, draft = _draft_model(config.draft, decoder, mesh, draft_key)
        drafter = with_lookup(drafter, config.draft.lookup, policy, config.rollout)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not config.draft.proposes and max(config.rollout.lengths):
        lengths = config.rollout.draft_lengths
        name, value = ("draft_lengths", lengths) if lengths else ("draft_length", config.rollout.draft_length)
        raise ConfigError(f"rollout.{name} = {value}: must be {(0,) if lengths else 0} with draft.kind none")
    memory = blank_memory(drafter, len(problems), config.rollout, mesh)
    return Networks(decoder, policy, drafter, Params(policy=weights, draft=draft, memory=memory), head)


def _policy(
    model: ModelConfig, mesh: Mesh, key: jax.Array, section: str, *, features: bool
) -> tuple[DecoderConfig, PyTree]:
    """The policy, with `features` such that it gives those that EAGLE-3 reads."""
    dtypes = dict(dtype=model.dtype, param_dtype=model.param_dtype)
    if model.path is None:
        if model.architecture is None:
            raise ConfigError(f"{section}.path = None: must be a directory as Hugging Face or launch.convert writes it")
        architecture = replace(model.architecture, **dtypes)
        layers = ()
        if features:
            given = model.feature_layers or architecture.feature_layers
            layers = given or eagle3_feature_layers(architecture.num_layers)
        decoder = replace(architecture, feature_layers=layers)
        return decoder, init_params(partial(init_decoder, decoder), key, mesh)
    path = Path(model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{section}.path = {path}: no config.json there")
    if (path / "params").is_dir():
        decoder, weights = load_policy_checkpoint(path, mesh)
        weights = jax.tree.map(lambda x: x.astype(model.param_dtype), weights)
        layers = (model.feature_layers or decoder.feature_layers) if features else ()
        return replace(decoder, **dtypes, feature_layers=layers), weights
    decoder = replace(read_hf_config(path, (model.feature_layers or None) if features else ()), **dtypes)
    return decoder, load_policy(path, decoder, mesh, model.param_dtype)


def _draft_model(
    draft: DraftConfig, policy: DecoderConfig, mesh: Mesh, key: jax.Array
) -> tuple[Drafter, DecoderConfig, PyTree]:
    model = ModelConfig(draft.path, draft.architecture, (), policy.dtype, policy.param_dtype)
    decoder, weights = _policy(model, mesh, key, "draft", features=False)
    if decoder.vocab_size != policy.vocab_size:
        raise ConfigError(f"draft.kind = model: its vocab_size is {decoder.vocab_size}, must be {policy.vocab_size}")
    decoder = replace(decoder, feature_layers=())
    return ModelDrafter(make_policy(decoder), draft.loss), decoder, weights


def frequent_tokens(
    problems: Sequence[Problem], tokenizer: Tokenizer, stop_tokens: Sequence[int], count: int, vocab_size: int
) -> np.ndarray:
    """`most_frequent` of the problems' texts, among the ids below `vocab_size`."""
    counts = np.zeros(vocab_size, np.int64)
    for problem in problems:
        for text in (problem.prompt, problem.solution or "", problem.answer):
            np.add.at(counts, np.asarray(tokenizer.encode(text), np.int64), 1)
    return most_frequent(counts, stop_tokens, count)


def most_frequent(counts: np.ndarray, stop_tokens: Sequence[int], count: int) -> np.ndarray:
    """`count` ids, int32 ascending: the stop tokens and those that `counts`, int [V], says to come most often.

    Where fewer come at all, the lowest of the others fill up what lacks.
    """
    ranked = sorted(range(len(counts)), key=lambda token: (token not in stop_tokens, -counts[token], token))
    return np.array(sorted(ranked[:count]), np.int32)
