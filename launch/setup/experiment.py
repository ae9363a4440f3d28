"""Construction of everything that a run needs before its first step: mesh, networks, problems, functions."""

import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import KINDS, AsynchronousConfig, RunConfig
from configs.schema.run import check_correction
from launch.cli.functions import load_function, refusing_errors
from launch.data.batches import PromptPipeline, PromptTable, prompt_pipeline
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer, Tokenizer
from launch.errors import ConfigError, as_config_error, check_all, first_line
from launch.jobs.hosts import request_cpu_devices
from launch.phases.long_phases import NOT_KEPT, LongPhases
from launch.setup.lookups import with_lookup
from launch.setup.networks import Networks, build_networks
from launch.setup.problems import Problems, build_problems, build_tokenizer, check_sources
from specjax import kernels
from specjax.asynchronous.weight_transfer import check_sizes
from specjax.carry_over.groups import nothing_carried
from specjax.carry_over.rollout import carry_over, carry_over_fn
from specjax.drafters import NoDrafter
from specjax.keys import SeedStep
from specjax.options import nearest_divisors, nearest_multiples
from specjax.parallel.mesh import batch_shards, disjoint_mesh, make_mesh
from specjax.rollout.generate import Choice, RolloutFn, per_shard, prepare
from specjax.rollout.plan import Phase, RolloutConfig, lay_out
from specjax.rollout.speculative import speculative_rollout
from specjax.short_repr import short_repr
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.loss import LossFn, policy_loss
from specjax.types import Params, Prompts, Rollout


@dataclass(frozen=True, eq=False)
class Experiment:
    """A run's mesh, networks, problems and functions.

    Attributes:
        config:     the resolved config: with all that ends a completion, and a frozen draft if it has no parameters.
        mesh:       devices that train.
        rollout_mesh: devices that generate; `mesh` unless the run is asynchronous.
        tokenizer:  of the problems' texts.
        problems:   to train and to evaluate on; empty if nothing needed them.
        networks:   policy and draft, with their parameters.
        rollout_fn: generates the completions of a step.
        loss_fn:    the policy's loss.
    """

    config: RunConfig
    mesh: Mesh
    rollout_mesh: Mesh
    tokenizer: Tokenizer
    problems: Problems
    networks: Networks
    rollout_fn: RolloutFn = speculative_rollout
    loss_fn: LossFn = policy_loss

    __repr__ = short_repr

    @cached_property
    def train_prompts(self) -> PromptTable:
        """Training prompts as token ids."""
        return self.encode_prompts(self.problems.train)

    def train_batches(self) -> PromptPipeline:
        """Return a new pipeline of training prompts: endless, one batch per step, starting at the first batch."""
        return prompt_pipeline(self.train_prompts, self.config.data.prompts, self.config.seed)

    @cached_property
    def held_out_prompts(self) -> PromptTable:
        """Held-out prompts as token ids."""
        return self.encode_prompts(self.problems.held_out)

    @property
    def prompt_width(self) -> int:
        """Tokens to which the prompts of a step are padded; data.max_prompt_tokens if problems are not read."""
        return self.train_prompts.width

    def with_params(self, params: Params) -> "Experiment":
        """Return the experiment with other parameters of its networks: the trained ones, or a checkpoint's."""
        draft = replace(self.networks.draft, params=params.draft)
        return replace(self, networks=replace(self.networks, params=params, draft=draft))

    def without_draft(self, *, keeps_lookup: bool = False) -> "Experiment":
        """Return the experiment with plain decoding, or with the lookup beside the draft."""
        drafter = NoDrafter()
        if keeps_lookup:
            drafter = with_lookup(drafter, self.config.draft.lookup, self.networks.policy, self.config.rollout)
        return replace(self, networks=replace(self.networks, drafter=drafter))

    def encode_prompts(self, problems: Sequence[Problem]) -> PromptTable:
        """Return the usable prompts of `problems` as token ids."""
        limit, vocab_size = self.config.data.max_prompt_tokens, self.networks.policy.vocab_size
        return PromptTable.build(problems, self.tokenizer, limit, vocab_size)

    @property
    def draft_vocabulary(self) -> list[int] | None:
        """Policy ids of a reduced draft vocabulary, ascending; None if the draft has the policy's vocabulary.

        They depend on the data, so readers of checkpoints compare them.
        """
        ids = self.networks.draft.target_ids
        return None if ids is None else ids.tolist()

    @property
    def checksum(self) -> int:
        """CRC-32 of the training prompts' token ids and problem indices, and of all answers. Resume compares it."""
        table, answers = self.train_prompts, [problem.answer for problem in self.problems.train]
        return zlib.crc32(repr((table.rows, table.ids.tolist(), answers)).encode())

    @property
    def sequences(self) -> int:
        """Number of sequences in the rollout of a step, over all shards."""
        return self.config.data.prompts * self.config.rollout.group_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a rollout, with the slots of one data shard."""
        shards = batch_shards(self.rollout_mesh)
        return lay_out(self.config.rollout, self.sequences // shards, self.prompt_width)

    def abstract_prompts(self, count: int) -> Prompts:
        """Return the shapes and dtypes of `count` prompts."""
        shapes = (count, self.prompt_width), (count,), (count,)
        return Prompts(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))  # pyright: ignore[reportArgumentType]

    def trace_rollout(self, config: RolloutConfig, prompts: int, mesh: Mesh, training: bool = False) -> Rollout:
        """Return the shapes and dtypes of a rollout of `prompts` prompts. Traces it, compiles and runs nothing.

        mesh: devices that generate it: `rollout_mesh` in training steps, otherwise `mesh`.
        training: it is the rollout of a training step; no other carries sequences over.

        Raises ConfigError if the rollout function raises or calls the host, or if its tokens or lengths have wrong
        shapes.
        """
        width, networks = self.prompt_width, self.networks
        policy, drafter, params = networks.policy, networks.drafter, networks.params
        rows = prompts * config.group_size
        phases = len(lay_out(config, rows // batch_shards(mesh), width))
        name, step = self.config.rollout.function, jax.ShapeDtypeStruct((), jnp.int32)
        draft_length_indices = jax.ShapeDtypeStruct((phases,), jnp.int32) if config.draft_lengths else None

        def run(params: Params, prompts: Prompts, seed_step: SeedStep, choice: Choice) -> Rollout:
            carried = nothing_carried(config, (len(prompts.lengths), width)) if training else None
            rollout_fn = self.rollout_fn if carried is None else carry_over_fn(self.rollout_fn)
            generate = per_shard(rollout_fn, policy, drafter, config, mesh)
            if carried is not None:
                generate = carry_over(generate, carried, seed_step[1])
            return generate(prepare(policy, drafter, params), prompts, seed_step, choice)

        refusing = nullcontext() if name is None else refusing_errors("rollout.function", name, "return a Rollout")
        try:
            with refusing, jax.set_mesh(mesh):
                args = replace(params, memory=()), self.abstract_prompts(prompts), (step, step), draft_length_indices
                jaxpr, rollout = jax.make_jaxpr(run, return_shape=True)(*args)
                if not isinstance(rollout, Rollout):
                    raise TypeError(f"returned {type(rollout).__name__}")
        except (TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            if mesh != self.mesh:
                # Messages name the axes of every mesh as options of `mesh`.
                reason = re.sub(r"(?<![\w.])mesh\.", "asynchronous.rollout_mesh.", reason)
            raise ConfigError(reason) from error
        if (call := next(host_calls(jaxpr.jaxpr), None)) is not None:
            raise ConfigError(
                f"rollout.function = {name}: calls the host by {call}; must not, because a data shard generates within "
                "one program: tools between turns are not supported"
            )
        actual, expected = (rollout.tokens.shape, rollout.lengths.shape), ((rows, config.max_new_tokens), (rows,))
        if actual != expected:
            raise ConfigError(f"rollout.function = {name}: tokens and lengths have shapes {actual}, must be {expected}")
        return rollout


def host_calls(jaxpr: jax.extend.core.Jaxpr) -> Iterator[str]:
    """Yield the name of each operation that waits for the host, in inner programs too. jax.debug.print does not."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pure_callback", "io_callback"):
            yield equation.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from host_calls(inner)


def build_experiment(
    config: RunConfig, training: bool = True, long_phases: LongPhases = NOT_KEPT, asynchronous: bool = False
) -> Experiment:
    """Build the experiment that `config` describes. Raises ConfigError if its sections contradict each other.

    training: False reads problems only if the draft may depend on them, because its vocabulary is chosen from them or
    a user function builds it, and skips the checks of how a training step is divided over the mesh.
    long_phases: shows the progress of loading. Raises Stopped at a signal.
    asynchronous: True follows the config's `asynchronous` section, which only runs do.
    """
    functions = _load_functions(config)
    checks = [partial(_check_correction, config)] if training else []
    if not asynchronous:
        config = replace(config, asynchronous=AsynchronousConfig())
    request_cpu_devices(config)
    meshes = list[Mesh]()
    checks += [partial(_make_meshes, config, meshes), partial(_check_windows, config)]
    if training:
        checks += [partial(_check_shards, config, meshes), partial(check_sources, config)]
    check_all(checks)
    mesh, rollout_mesh = meshes
    with long_phases.phase("loading", 3, "parts", kept=False, quiet=True) as phase:
        tokenizer = build_tokenizer(config)
        phase.finish(note="tokenizer loaded", program="tokenizer")
        config = _with_stops(config, tokenizer)
        needs_problems = training or config.draft.vocab_size is not None or config.draft.kind not in KINDS
        problems = build_problems(config) if needs_problems else Problems(train=[], held_out=[])
        phase.finish(note="problems loaded", program="problems")
        networks = build_networks(config, mesh, tokenizer, problems.train)
        _check_experts(config, networks)
        phase.finish(note="networks loaded", program="networks")
    config = _frozen_if_empty(config, networks)
    return Experiment(config, mesh, rollout_mesh, tokenizer, problems, networks, *functions)


def abstract_experiment(config: RunConfig, mesh: Mesh, rollout_mesh: Mesh | None = None) -> Experiment:
    """Build the experiment with its networks as shapes, on meshes whose devices may be absent.

    rollout_mesh: devices that generate; None: those of `mesh`.

    Reads neither weights nor the tokenizer of a checkpoint, and problems only for a lookup that remembers them. Raises
    ConfigError if sections of `config` contradict each other.
    """
    functions = _load_functions(config)
    rollout_mesh = mesh if rollout_mesh is None else rollout_mesh
    sizes = {"shards": batch_shards(mesh), "rollout_shards": batch_shards(rollout_mesh)}
    checks = _check_correction, _check_windows, partial(_check_divisibility, **sizes)
    check_all([partial(check, config) for check in checks])
    # Only a checkpoint's tokenizer has the ids of stop tokens that are given as text, and finds stop strings.
    tokenizer = ByteTokenizer()
    tokenizer.stop_tokens = tuple(token for token in config.rollout.stop_tokens if not isinstance(token, str)) or (0,)
    if config.data.tokenizer != "checkpoint":
        tokenizer = build_tokenizer(config)
    config = _with_stops(config, tokenizer)
    remembered = build_problems(config).train if config.draft.lookup.kind == "history" else []
    networks = build_networks(config, mesh, tokenizer, remembered, shapes=True)
    _check_experts(config, networks)
    config = _frozen_if_empty(config, networks)
    unread = Problems(train=[], held_out=[])
    return Experiment(config, mesh, rollout_mesh, tokenizer, unread, networks, *functions)


def _with_stops(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Return the config with what ends a completion, as the rollout reads it."""
    stops = {"stop_tokens": tokenizer.stop_tokens, "stop_strings": tokenizer.stop_strings}
    return replace(config, rollout=replace(config.rollout, **stops))


def _frozen_if_empty(config: RunConfig, networks: Networks) -> RunConfig:
    """Return the config with a frozen draft if the draft has no parameters."""
    return config if networks.draft.has_params else replace(config, draft_training=DraftTrainingConfig(mode="frozen"))


def _load_functions(config: RunConfig) -> tuple[RolloutFn, LossFn]:
    """Return the run's rollout function and loss. Raises ConfigError if they cannot be imported."""
    rollout, loss = config.rollout.function, config.loss.function
    return (
        speculative_rollout if rollout is None else load_function("rollout.function", rollout),
        policy_loss if loss is None else load_function("loss.function", loss),
    )


def _make_meshes(config: RunConfig, meshes: list[Mesh]) -> None:
    """Append the meshes that train and that generate. Raises ConfigError if the devices do not allow them."""
    lag = config.asynchronous.lag
    with as_config_error():
        # Raises if SPECJAX_KERNELS is invalid.
        kernels.compiler_options(jnp.dtype(config.model.dtype))
        mesh = make_mesh(config.mesh, alone=lag is None)
        meshes.append(mesh)
        rollout_mesh = mesh if lag is None else disjoint_mesh(config.asynchronous.rollout_mesh, mesh)
        if lag is not None:
            check_sizes(mesh, rollout_mesh)
        meshes.append(rollout_mesh)


def _check_experts(config: RunConfig, networks: Networks) -> None:
    """Raise ConfigError for devices along `expert` if neither network has experts: they would all do the same."""
    specs = [x.sharding.spec for x in jax.tree.leaves((networks.params.policy, networks.params.draft))]
    if networks.policy.mixture is not None or any("expert" in axes for axes in map(jax.tree.leaves, specs)):
        return
    for name, mesh in (("mesh", config.mesh), ("asynchronous.rollout_mesh", config.asynchronous.rollout_mesh)):
        if mesh.expert > 1:
            raise ConfigError(f"{name}.expert = {mesh.expert}: must be 1; neither network has a mixture of experts")


def _check_correction(config: RunConfig) -> None:
    with as_config_error():
        check_correction(config)


def _check_divisibility(config: RunConfig, shards: int, rollout_shards: int) -> None:
    """Raise a ConfigError unless prompts, groups, minibatches and microbatches divide over the data shards.

    It has a line for each that does not. Those that depend on a refused number are checked with the nearest that works.
    """
    refused, prompts, groups, updates = list[str](), config.data.prompts, config.selection.groups, config.updates
    counts = {"mesh": shards, "asynchronous.rollout_mesh": rollout_shards}
    data_shards = math.lcm(shards, rollout_shards)
    failing = [f"{mesh}.data x {mesh}.fsdp = {count}" for mesh, count in counts.items() if prompts % count]
    if failing:
        if rollout_shards == shards:
            failing = failing[:1]
        near = nearest_multiples(prompts, data_shards)
        refused.append(f"data.prompts = {prompts}: must be a multiple of {' and of '.join(failing)}; nearest: {near}")
        prompts = _nearest_multiple(prompts, data_shards)
    share, finished = config.rollout.carry_over, config.rollout.finished_groups(prompts)
    if share is not None and (finished % data_shards or not 0 < finished < prompts):
        allowed = range(data_shards, prompts, data_shards)
        near = sorted(allowed, key=lambda count: abs(count - share * prompts))[:2]
        # Rounded up, because a share is rounded down to prompts.
        shares = " or ".join(f"{math.ceil(1e4 * count / prompts) / 1e4:g}" for count in sorted(near))
        refused.append(
            f"rollout.carry_over = {share}: finishes {finished} of data.prompts = {prompts} in a step; must be above "
            f"0, below {prompts} and a multiple of the {data_shards} data shards; "
            + (f"nearest: {shares}" if near else "needs more data.prompts")
        )
        finished = near[0] if near else prompts
    if groups % shards or groups > finished:
        near = nearest_multiples(min(groups, finished), shards)
        most = f"data.prompts = {prompts}" if share is None else f"{finished}, the prompts that a step finishes"
        refused.append(
            f"selection.groups = {groups}: must be a multiple of mesh.data x mesh.fsdp = {shards}, and at most {most}; "
            f"nearest: {near}"
        )
        groups = _nearest_multiple(min(groups, finished), shards)
    sequences, minibatches = (groups or finished) * config.rollout.group_size // shards, updates.minibatches
    if sequences % (minibatches * config.microbatches):
        name = f"updates.minibatches x microbatches = {minibatches} x {config.microbatches}"
        if minibatches == 1:
            name = f"microbatches = {config.microbatches}"
        option, value, number = "microbatches", config.microbatches, sequences // minibatches
        if sequences % minibatches:
            option, value, number = "updates.minibatches", minibatches, sequences
        refused.append(
            f"{name}: must divide {sequences}, the sequences that a data shard trains on per step"
            f"{f' with data.prompts = {prompts}' * (prompts != config.data.prompts)}; nearest {option}: "
            f"{nearest_divisors(value, number)}"
        )
    if refused:
        raise ConfigError(*refused)


def _check_shards(config: RunConfig, meshes: Sequence[Mesh]) -> None:
    """Raise ConfigError unless the batches of a training step, and of a new run's distillation, divide over the meshes.

    meshes: those that could be made, of the one that trains and the one that generates.
    """
    if not meshes:
        return
    shards, rollout_shards = batch_shards(meshes[0]), batch_shards(meshes[-1])
    checks = [partial(_check_divisibility, config, shards, rollout_shards)]
    if config.distill.steps and not config.resume:
        checks.append(partial(check_distillation_batch, config, shards))
    check_all(checks)


def check_distillation_batch(config: RunConfig, shards: int) -> None:
    """Raise ConfigError unless the microbatches of distillation divide over the data shards."""
    rows, parts = config.distill.batch_size, config.distill.microbatches * shards
    if rows % parts:
        raise ConfigError(
            f"distill.batch_size = {rows}: must be a multiple of distill.microbatches x mesh.data x mesh.fsdp = "
            f"{parts}; nearest: {nearest_multiples(rows, parts)}"
        )


def _nearest_multiple(value: int, factor: int) -> int:
    return max(1, round(value / factor)) * factor


def _check_windows(config: RunConfig) -> None:
    """Raise ConfigError if a phase's window is shorter than the longest prompt."""
    for _, window in config.rollout.phases:
        if window < config.data.max_prompt_tokens:
            raise ConfigError(
                f"rollout.phases = {config.rollout.phases}: a window of {window} is too short for a prompt; "
                f"must be at least data.max_prompt_tokens = {config.data.max_prompt_tokens}"
            )
