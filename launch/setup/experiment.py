"""Construction of everything that a run needs before its first step: mesh, networks, problems, functions."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import KINDS, AsynchronousConfig, RolloutOptions, RunConfig
from launch.cli.functions import load_function
from launch.data.batches import PromptPipeline, PromptTable, prompt_pipeline
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer, Tokenizer
from launch.environments.build import EnvironmentOf, Local, environment_of, planned_environment_of
from launch.errors import as_config_error, check_all
from launch.jobs.hosts import request_cpu_devices
from launch.phases.long_phases import long_phase
from launch.setup.checks import check_correction, check_divisibility, check_experts, check_shards, check_windows
from launch.setup.lookups import with_lookup
from launch.setup.networks import Networks, build_networks
from launch.setup.problems import Problems, build_problems, build_tokenizer, check_sources
from launch.setup.teacher import Teacher, build_teacher
from specjax import kernels
from specjax.asynchronous.weight_transfer import check_sizes
from specjax.drafters import NoDrafter
from specjax.parallel.mesh import batch_shards, disjoint_mesh, make_mesh
from specjax.rewards import RewardFn
from specjax.rollout.generate import RolloutFn
from specjax.rollout.plan import Phase, lay_out
from specjax.rollout.speculative import speculative_rollout
from specjax.short_repr import short_repr
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.loss import LossFn, policy_loss
from specjax.train.stages import Stages
from specjax.types import Hints, Prompts, TrainState


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
        teacher:    what the policy learns from beside rewards; None without one.
        environment_of: problems -> what answers between the turns of their completions; None: they are one turn.
    """

    config: RunConfig
    mesh: Mesh
    rollout_mesh: Mesh
    tokenizer: Tokenizer
    problems: Problems
    networks: Networks
    rollout_fn: RolloutFn = speculative_rollout
    loss_fn: LossFn = policy_loss
    teacher: Teacher | None = None
    environment_of: EnvironmentOf | None = None

    __repr__ = short_repr

    @cached_property
    def train_prompts(self) -> PromptTable:
        """Training prompts as token ids."""
        return self.encode_prompts(self.problems.train, with_hints=self.config.teacher.hint == "solution")

    def train_batches(self) -> PromptPipeline:
        """Return a new pipeline of training prompts: endless, one batch per step, starting at the first batch."""
        return prompt_pipeline(self.train_prompts, self.config.data.prompts, self.config.seed)

    @cached_property
    def held_out_prompts(self) -> PromptTable:
        """Held-out prompts as token ids."""
        return self.encode_prompts(self.problems.held_out)

    @cached_property
    def step_config(self) -> RunConfig:
        """The config that training steps are compiled with: with the environment of the training problems."""
        return replace(self.config, rollout=self.rollout_on(self.problems.train))

    def stages(self, reward_fn: RewardFn, config: TrainConfig | None = None) -> Stages:
        """Return the stages of a training step. config: in place of `step_config`."""
        networks, teacher = self.networks, self.teacher
        return Stages(
            *(networks.policy, networks.drafter, reward_fn, config or self.step_config, self.mesh),
            *(self.rollout_fn, self.loss_fn),
            teacher=None if teacher is None else teacher.policy,
            hint_template=None if teacher is None else teacher.hints,
        )

    def rollout_on(self, problems: Sequence[Problem]) -> RolloutOptions:
        """Return the options of rollouts whose prompts' ids are indices into `problems`, with their environment."""
        environment = None if self.environment_of is None else self.environment_of(problems)
        return replace(self.config.rollout, environment=environment)

    @property
    def prompt_width(self) -> int:
        """Tokens to which the prompts of a step are padded; data.max_prompt_tokens if problems are not read."""
        return self.train_prompts.width

    def with_state(self, state: TrainState) -> "Experiment":
        """Return the experiment with the networks of a state. Steps took those that the experiment began with."""
        draft = replace(self.networks.draft, params=state.params.draft)
        networks = replace(self.networks, params=state.params, draft=draft)
        teacher = None if self.teacher is None else replace(self.teacher, params=state.teacher)
        return replace(self, networks=networks, teacher=teacher)

    def without_draft(self, *, keeps_lookup: bool = False) -> "Experiment":
        """Return the experiment with plain decoding, or with the lookup beside the draft."""
        drafter = NoDrafter()
        if keeps_lookup:
            drafter = with_lookup(drafter, self.config.draft.lookup, self.networks.policy, self.config.rollout)
        return replace(self, networks=replace(self.networks, drafter=drafter))

    def encode_prompts(self, problems: Sequence[Problem], with_hints: bool = False) -> PromptTable:
        """Return the usable prompts of `problems` as token ids, if wanted with their worked solutions."""
        limit, vocab_size = self.config.data.max_prompt_tokens, self.networks.policy.vocab_size
        return PromptTable.build(problems, self.tokenizer, limit, vocab_size, with_hints=with_hints)

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
        hints = () if table.hints is None else (table.hints,)
        return zlib.crc32(repr((table.rows, table.ids.tolist(), answers, *hints)).encode())

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
        hints = self.train_prompts.hint_width or self.config.data.max_prompt_tokens
        shapes = [(count, self.prompt_width), (count,), (count,), (count, hints), (count,)]
        prompts = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        hinted = Hints(*prompts[3:]) if self.config.teacher.hint == "solution" else None  # pyright: ignore[reportArgumentType]
        return Prompts(*prompts[:3], hints=hinted)  # pyright: ignore[reportArgumentType]


def build_experiment(
    config: RunConfig, training: bool = True, takes_steps: bool = False, local: Local | None = None
) -> Experiment:
    """Build the experiment that `config` describes. Raises ConfigError if its sections contradict each other.

    training: False reads problems only if the draft may depend on them, because its vocabulary is chosen from them or
    a user function builds it, and skips the checks of how a training step is divided over the mesh.
    takes_steps: True builds what only training steps need: the meshes of the `asynchronous` section, and the teacher.
    local: the environment of a script or notebook, in place of the config's.
    """
    functions = _load_functions(config)
    checks = [partial(check_correction, config)] if training else []
    if not takes_steps:
        config = replace(config, asynchronous=AsynchronousConfig())
    request_cpu_devices(config)
    meshes = list[Mesh]()
    checks += [partial(_make_meshes, config, meshes), partial(check_windows, config)]
    if training:
        checks += [partial(check_shards, config, meshes), partial(check_sources, config)]
    check_all(checks)
    mesh, rollout_mesh = meshes
    with long_phase("loading", 3, "parts", kept=False, quiet=True) as phase:
        tokenizer = build_tokenizer(config)
        phase.finish(note="tokenizer loaded", program="tokenizer")
        config = _with_stops(config, tokenizer)
        environments = environment_of(config, tokenizer, local)
        needs_problems = training or config.draft.vocab_size is not None or config.draft.kind not in KINDS
        problems = build_problems(config) if needs_problems else Problems(train=[], held_out=[])
        phase.finish(note="problems loaded", program="problems")
        networks = build_networks(config, mesh, tokenizer, problems.train)
        check_experts(config, networks)
        phase.finish(note="networks loaded", program="networks")
        teacher = build_teacher(config, networks, tokenizer, mesh) if takes_steps else None
    config = _frozen_if_empty(config, networks)
    return Experiment(config, mesh, rollout_mesh, tokenizer, problems, networks, *functions, teacher, environments)


def abstract_experiment(config: RunConfig, mesh: Mesh, rollout_mesh: Mesh | None = None) -> Experiment:
    """Build the experiment with its networks as shapes, on meshes whose devices may be absent.

    rollout_mesh: devices that generate; None: those of `mesh`.

    Reads neither weights nor the tokenizer of a checkpoint, and problems only for a lookup that remembers them. Raises
    ConfigError if sections of `config` contradict each other.
    """
    functions = _load_functions(config)
    rollout_mesh = mesh if rollout_mesh is None else rollout_mesh
    sizes = {"shards": batch_shards(mesh), "rollout_shards": batch_shards(rollout_mesh)}
    checks = check_correction, check_windows, partial(check_divisibility, **sizes)
    check_all([partial(check, config) for check in checks])
    # Only a checkpoint's tokenizer has the ids of stop tokens that are given as text, and finds stop strings.
    tokenizer = ByteTokenizer()
    tokenizer.stop_tokens = tuple(token for token in config.rollout.stop_tokens if not isinstance(token, str)) or (0,)
    if config.data.tokenizer != "checkpoint":
        tokenizer = build_tokenizer(config)
    config, environments = _with_stops(config, tokenizer), planned_environment_of(config)
    remembered = build_problems(config).train if config.draft.lookup.kind == "history" else []
    networks = build_networks(config, mesh, tokenizer, remembered, shapes=True)
    check_experts(config, networks)
    config = _frozen_if_empty(config, networks)
    unread, teacher = Problems(train=[], held_out=[]), build_teacher(config, networks, tokenizer, mesh, shapes=True)
    return Experiment(config, mesh, rollout_mesh, tokenizer, unread, networks, *functions, teacher, environments)


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
