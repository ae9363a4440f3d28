"""The training state as shapes with shardings, and as arrays, which are made from those shapes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.carry_over.groups import nothing_carried
from specjax.cost import Seconds, init_drafting
from specjax.parallel.mesh import BATCH_AXES
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import init_draft_training
from specjax.train.optimizer import moment_shardings
from specjax.train.stages import optimizers_of
from specjax.types import Params, PyTree, TrainState


def init_train_state(
    params: Params,
    config: TrainConfig,
    mesh: Mesh,
    with_reference: bool = False,
    seconds: Seconds | None = None,
    prompts: tuple[int, int] | None = None,
    teacher: PyTree | None = None,
) -> TrainState:
    """Return a fresh state around `params`, which must be on the mesh already. Moments are sharded as their parameters.

    with_reference: keep a reference for KL: a copy of the current policy, or the base of one with adapters.
    seconds:        seconds of a round, for each phase that `lay_out` returns and each of the rollout's draft_lengths;
                    required if draft_lengths is set.
    prompts:        (prompts per step, padded width); required if rollouts are replayed, and with carry-over.
    teacher:        parameters of a teacher that is a network of its own, on the mesh.
    """
    abstract = abstract_train_state(params, config, mesh, with_reference, seconds, prompts, teacher)
    made = replace(abstract, params=None, teacher=None)
    layout = jax.tree.map(lambda x: x.sharding, made)

    @partial(jax.jit, out_shardings=layout)
    def make(params: Params, seconds: Seconds | None) -> TrainState:
        return replace(_initial(config, with_reference, prompts, params, seconds), params=None)

    return replace(make(params, seconds), params=params, teacher=teacher)


def abstract_train_state(
    params: Params,
    config: TrainConfig,
    mesh: Mesh,
    with_reference: bool = False,
    seconds: Seconds | jax.ShapeDtypeStruct | None = None,
    prompts: tuple[int, int] | None = None,
    teacher: PyTree | None = None,
) -> TrainState:
    """Return what `init_train_state` would return, as ShapeDtypeStructs with shardings. Allocates nothing.

    params, teacher: arrays, or ShapeDtypeStructs with shardings.
    """
    lengths = config.rollout.draft_lengths
    if lengths and seconds is None:
        raise ValueError(f"draft_lengths = {lengths}: to choose among them, the seconds of a round must be given")
    state = jax.eval_shape(partial(_initial, config, with_reference, prompts), params, seconds)

    def placed(shapes: PyTree, sharding: NamedSharding) -> PyTree:
        return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)

    def like(shapes: PyTree, layout: PyTree) -> PyTree:
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, layout)

    optimizers, everywhere = optimizers_of(config), NamedSharding(mesh, P())
    own = jax.tree.map(lambda x: x.sharding, params)
    adaptation = placed(state.adaptation, everywhere)
    if adaptation is not None and adaptation.replay is not None:
        rows = NamedSharding(mesh, P(None, BATCH_AXES))
        adaptation = replace(adaptation, replay=placed(adaptation.replay, rows))
    return TrainState(
        step=placed(state.step, everywhere),
        params=like(state.params, own),
        optimizer=Params(
            policy=like(state.optimizer.policy, moment_shardings(optimizers.policy, params.policy, mesh)),
            draft=like(state.optimizer.draft, moment_shardings(optimizers.draft, params.draft, mesh)),
        ),
        reference=like(state.reference, own.policy) if state.reference else state.reference,
        teacher=None if teacher is None else jax.tree.map(_shape_of, teacher),
        drafting=placed(state.drafting, everywhere),
        adaptation=adaptation,
        carried=placed(state.carried, NamedSharding(mesh, P(BATCH_AXES))),
    )


def _initial(
    config: TrainConfig,
    with_reference: bool,
    prompts: tuple[int, int] | None,
    params: Params,
    seconds: Seconds | None,
) -> TrainState:
    """Return the state before the first step, wherever the compiler places it."""
    rows = None
    if prompts is not None:
        groups = config.trained_groups(prompts[0])
        rows = groups * config.rollout.group_size, prompts[1] + config.rollout.max_new_tokens
    if params.base and config.reference_every:
        raise ValueError(
            f"reference_every = {config.reference_every}: must be 0 with adapters, whose reference is the base"
        )
    optimizers, turns = optimizers_of(config), config.rollout.environment is not None
    reference = {} if params.base else jax.tree.map(jnp.copy, params.policy)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        optimizer=Params(optimizers.policy.init(params.policy), optimizers.draft.init(params.draft)),
        reference=reference if with_reference else None,
        drafting=None if seconds is None else init_drafting(config.rollout.draft_lengths, seconds),
        adaptation=init_draft_training(config.draft_training, rows, turns) if jax.tree.leaves(params.draft) else None,
        carried=nothing_carried(config.rollout, prompts),
    )


def _shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
