"""Everything that a run needs before its first step: mesh, networks, problems, functions."""

import math
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.build.draft import BUILDERS
from launch.build.networks import Networks, build_networks
from launch.build.problems import Problems, build_problems, build_tokenizer
from launch.cli.errors import ConfigError
from launch.cli.functions import load_function
from launch.data.batches import PromptPipeline, PromptTable, prompt_pipeline
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from specjax import kernels
from specjax.parallel.mesh import batch_shards, make_mesh
from specjax.rollout.generate import RolloutFn, per_shard, prepare
from specjax.rollout.plan import Phase, RolloutConfig, lay_out
from specjax.rollout.speculative import speculative_rollout
from specjax.train.adaptation import DraftTrainingConfig
from specjax.train.loss import LossFn, policy_loss
from specjax.types import Prompts, Rollout


@dataclass(frozen=True)
class Experiment:
    """A run's mesh, networks, problems and functions.

    config: resolved: with the tokenizer's stop tokens where the recipe names none, and without the training of a draft
            that has no parameters.
    """

    config: RunConfig
    mesh: Mesh
    tokenizer: Tokenizer
    problems: Problems
    networks: Networks
    rollout_fn: RolloutFn = speculative_rollout
    loss_fn: LossFn = policy_loss

    @cached_property
    def train_prompts(self) -> PromptTable:
        """The training prompts as token ids."""
        return self.encode_prompts(self.problems.train)

    def train_batches(self) -> PromptPipeline:
        """Return endless batches of training prompts, one a step, from the first on."""
        return prompt_pipeline(self.train_prompts, self.config.data.prompts, self.config.seed)

    @cached_property
    def held_out_prompts(self) -> PromptTable:
        """The held-out prompts as token ids."""
        return self.encode_prompts(self.problems.held_out)

    def encode_prompts(self, problems: Sequence[Problem]) -> PromptTable:
        """Return the prompts of any problems as token ids."""
        width, vocab_size = self.config.data.max_prompt_tokens, self.networks.policy.vocab_size
        return PromptTable.build(problems, self.tokenizer, width, vocab_size)

    @property
    def draft_vocabulary(self) -> list[int] | None:
        """The policy's ids of a reduced draft vocabulary. They depend on the data: readers of checkpoints check."""
        ids = self.networks.draft.target_ids
        return None if ids is None else ids.tolist()

    @property
    def checksum(self) -> int:
        """Return a checksum of the training prompts, as token ids, and their answers: resume compares it."""
        table, answers = self.train_prompts, [problem.answer for problem in self.problems.train]
        return zlib.crc32(repr((table.rows, table.ids.tolist(), answers)).encode())

    @property
    def sequences(self) -> int:
        """Sequences in the rollout of a step, over all shards."""
        return self.config.data.prompts * self.config.rollout.group_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the run's rollouts on each shard."""
        shards = batch_shards(self.mesh)
        return lay_out(self.config.rollout, self.sequences // shards, self.config.data.max_prompt_tokens)

    def trace_rollout(self, config: RolloutConfig, prompts: int) -> Rollout:
        """Return the shapes of a rollout of so many prompts, without compiling or running anything.

        Raises ConfigError where the rollout function refuses its input or returns sequences of other shapes.
        """
        width, policy, params = self.config.data.max_prompt_tokens, self.networks.policy, self.networks.params
        phases = len(lay_out(config, prompts * config.group_size // batch_shards(self.mesh), width))
        shaped: Any = jax.ShapeDtypeStruct
        tokens, each, scalar = (shaped(shape, jnp.int32) for shape in ((prompts, width), (prompts,), ()))
        chosen = shaped((phases,), jnp.int32) if config.draft_lengths else None
        generate = per_shard(self.rollout_fn, policy, self.networks.drafter, config, self.mesh)
        try:
            with jax.set_mesh(self.mesh):
                rollout = jax.eval_shape(
                    lambda params, *rest: generate(prepare(params, policy.dtype), *rest),
                    *(replace(params, memory=()), Prompts(tokens, each, each), (scalar, scalar), chosen),
                )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rollout.function = {self.config.rollout.function}: {error}") from error
        rows = prompts * config.group_size
        found, expected = (rollout.tokens.shape, rollout.lengths.shape), ((rows, config.max_new_tokens), (rows,))
        if found != expected:
            name = self.config.rollout.function
            raise ConfigError(f"rollout.function = {name}: tokens and lengths have shapes {found}, must be {expected}")
        return rollout


def build_experiment(config: RunConfig, training: bool = True) -> Experiment:
    """Build everything that `config` names. Raises ConfigError where its parts do not fit each other.

    Without `training`, problems are read only where the draft may depend on them: where its vocabulary was chosen from
    them, or its builder is not a built-in one.
    """
    _check_windows(config)
    rollout_fn = _named("rollout.function", config.rollout.function, speculative_rollout)
    loss_fn = _named("loss.function", config.loss.function, policy_loss)
    _offer_cpu_devices(math.prod(config.mesh.shape))
    try:
        mesh = make_mesh(config.mesh)
        # Refuses a bad SPECJAX_KERNELS.
        kernels.compiler_options(jnp.dtype(config.model.dtype))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if training:
        _check_split(config, batch_shards(mesh))
    tokenizer = build_tokenizer(config)
    stop_tokens = config.rollout.stop_tokens or tokenizer.stop_tokens
    config = replace(config, rollout=replace(config.rollout, stop_tokens=stop_tokens))
    needed = training or config.draft.vocab_size is not None or config.draft.kind not in BUILDERS
    problems = build_problems(config) if needed else Problems(train=[], held_out=[])
    networks = build_networks(config, mesh, tokenizer, problems.train)
    if not networks.draft.has_params:
        config = replace(config, draft_training=DraftTrainingConfig(mode="frozen"))
    return Experiment(config, mesh, tokenizer, problems, networks, rollout_fn, loss_fn)


def _named(option: str, name: str | None, builtin: Callable[..., Any]) -> Callable[..., Any]:
    return builtin if name is None else load_function(option, name)


def _offer_cpu_devices(count: int) -> None:
    """Offer `count` CPU devices, at most one per core, so that the parts of a mesh run in parallel.

    Changes nothing if XLA_FLAGS sets the count or JAX is initialised. Other platforms are unaffected.
    """
    if count > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(count, os.cpu_count() or 1))


def _check_split(config: RunConfig, shards: int) -> None:
    prompts = config.data.prompts
    if prompts % shards:
        raise ConfigError(f"data.prompts = {prompts}: must be a multiple of mesh.data x mesh.fsdp = {shards}")
    groups, updates = config.selection.groups, config.updates
    if groups % shards or groups > prompts:
        raise ConfigError(
            f"selection.groups = {groups}: must be a multiple of mesh.data x mesh.fsdp = {shards}, and at most "
            f"data.prompts = {prompts}"
        )
    sequences, parts = (groups or prompts) * config.rollout.group_size // shards, updates.minibatches
    if sequences % (parts * config.microbatches):
        name = f"updates.minibatches x microbatches = {parts} x {config.microbatches}"
        if parts == 1:
            name = f"microbatches = {config.microbatches}"
        raise ConfigError(f"{name}: must divide the {sequences} sequences of a data shard that train")


def _check_windows(config: RunConfig) -> None:
    for _, window in config.rollout.phases:
        if window < config.data.max_prompt_tokens:
            raise ConfigError(
                f"rollout.phases = {config.rollout.phases}: a window of {window} holds no prompt, "
                f"must be at least data.max_prompt_tokens = {config.data.max_prompt_tokens}"
            )
