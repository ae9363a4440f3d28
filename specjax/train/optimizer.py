"""Optimisers: one optax chain for each network."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from specjax.options import Fraction, NonNegative, Options, above, at_least, at_most
from specjax.param_labels import hidden_matrices, matrices
from specjax.train.draft.schedule import maybe_cond
from specjax.types import Params, PyTree

# Decay of a moment. The bound is below 1 in float32 too.
Decay = Annotated[float, at_least(0), at_most(0.999999)]
Rate = Annotated[float, at_least(0), at_most(1000)]


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """AdamW (arXiv 1711.05101) or Muon (Jordan et al. 2024) after a clip of the global gradient norm.

    Muon orthogonalises the momentum of the matrices within the network; embeddings, vocabulary heads, norms and biases
    use Adam (`specjax.param_labels`). Its updates are scaled to AdamW's size by 0.2 sqrt(max(in, out)) (arXiv
    2502.16982), so that one learning rate and weight decay serve both. Weight decay applies to matrices and embeddings,
    not to norms and biases.

    Attributes:
        kind:          Optimiser.
        learning_rate: Learning rate after the linear warm-up.
        warmup_steps:  Steps of the warm-up; 0 starts at the full rate.
        schedule:      After the warm-up: constant, or falling linearly or by a cosine.
        decay_steps:   Steps over which the rate falls.
        floor:         Rate after that, as a fraction of learning_rate.
        b1:            Adam's decay of the first moment.
        b2:            Adam's decay of the second moment.
        momentum:      Muon's Nesterov momentum.
        weight_decay:  Decoupled weight decay, in units of the learning rate.
        clip_norm:     Largest global norm of the gradient.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate = 1e-6
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: NonNegative = 0
    floor: Fraction = 0.0
    b1: Decay = 0.9
    b2: Decay = 0.999
    momentum: Decay = 0.95
    weight_decay: Rate = 0.0
    clip_norm: Annotated[float, above(0), at_most(1e12)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule != "constant" and self.decay_steps < 1:
            raise ValueError(f"decay_steps = {self.decay_steps}: must be at least 1 with schedule {self.schedule}")
        if self.schedule == "constant" and (self.decay_steps or self.floor):
            name = "decay_steps" if self.decay_steps else "floor"
            raise ValueError(f"{name} = {getattr(self, name)}: must be 0 with schedule constant")


def make_optimizer(c: OptimizerConfig, steps: int | None = None) -> optax.GradientTransformation:
    """Return the chain for one network. With `steps`, the rate falls after warm-up, by a cosine, to 0 at that step."""
    if steps is not None:
        c = replace(c, schedule="cosine", decay_steps=max(steps - c.warmup_steps, 1), floor=0.0)
    adam = optax.scale_by_adam(c.b1, c.b2)
    by_kind = {
        "adamw": adam,
        "muon": optax.partition({"muon": _scale_by_muon(c.momentum), "adam": adam}, _labels),
    }
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.chain(
            by_kind[c.kind],
            optax.add_decayed_weights(c.weight_decay, matrices),
            optax.scale_by_learning_rate(_schedule(c)),
        ),
    )


def learning_rate(c: OptimizerConfig, state: PyTree) -> Float[Array, ""]:
    """Return the learning rate of the next update. state: of the chain of `make_optimizer`."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.float32(_schedule(c)(state[-1][-1].count))


def _schedule(c: OptimizerConfig) -> optax.Schedule:
    rise = optax.linear_schedule(c.learning_rate / (c.warmup_steps + 1), c.learning_rate, c.warmup_steps)
    match c.schedule:
        case "constant":
            return rise
        case "linear":
            fall = optax.linear_schedule(c.learning_rate, c.floor * c.learning_rate, c.decay_steps)
        case "cosine":
            fall = optax.cosine_decay_schedule(c.learning_rate, c.decay_steps, c.floor)
    return optax.join_schedules((rise, fall), (c.warmup_steps,))


def _labels(params: PyTree) -> PyTree:
    axes = hidden_matrices(params)
    return jax.tree.map(lambda x, own: "adam" if own is None else "muon", params, axes)


def _scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Return Muon's transformation, scaled so that updates have root mean square 0.2, as AdamW's do."""

    def resize(update: Array, axes: optax.contrib.MuonDimensionNumbers) -> Array:
        contracted, given = cast(tuple[tuple[int, ...], tuple[int, ...]], axes)
        sizes = (math.prod(update.shape[axis] for axis in own) for own in (contracted, given))
        return update * (0.2 * math.sqrt(max(sizes)))

    return optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=hidden_matrices),
        optax.stateless(lambda updates, params: jax.tree.map(resize, updates, hidden_matrices(updates))),
    )


def init_moments(optimizer: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
    """Return the optimiser's state on the mesh: moments sharded as their parameters, counters replicated."""
    return jax.jit(optimizer.init, out_shardings=moment_shardings(optimizer, params, mesh))(params)


def moment_shardings(optimizer: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
    """Return the shardings of the optimiser's state for parameters that are arrays, or shapes with shardings."""
    everywhere = NamedSharding(mesh, P())
    return optax.tree_map_params(
        optimizer,
        lambda x, param: x if isinstance(x, optax.MaskedNode) else param.sharding,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: everywhere,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def usable(gradient: PyTree, loss: Array) -> Bool[Array, ""]:
    """Return whether a loss and its gradient are finite."""
    return jnp.isfinite(optax.tree.norm(gradient)) & jnp.isfinite(loss)


def update(
    optimizer: optax.GradientTransformation, gradient: PyTree, state: PyTree, params: PyTree, moves: Bool[Array, ""]
) -> tuple[PyTree, PyTree]:
    """Return (params, optimiser state) after one update of one network; unchanged unless it `moves`."""
    # optax mixes weakly typed scalars into every transform, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
        updates, next_state = optimizer.update(gradient, state, params)
        after = optax.apply_updates(params, updates), next_state
    # Selected per element, fused with the pass that writes them: a conditional would keep both in memory.
    return jax.tree.map(partial(jnp.where, moves), after, (params, state))


def make_optimizers(policy: OptimizerConfig, draft: OptimizerConfig | None) -> Params:
    """Return a chain for each network, as `Params` of optax transformations. Without a config the draft is fixed."""
    return Params(make_optimizer(policy), optax.set_to_zero() if draft is None else make_optimizer(draft))


def apply_gradients(
    optimizers: Params,
    gradients: Params,
    states: Params,
    params: Params,
    moves: Params,
    train_draft: bool | Bool[Array, ""] = True,
) -> tuple[Params, Params]:
    """Return (params, optimiser states) after one update of each network by its own chain.

    moves: False for a network that stays as it is, with its moments. Without `train_draft`, the draft does too.
    """
    policy, policy_state = update(optimizers.policy, gradients.policy, states.policy, params.policy, moves.policy)
    draft, draft_state = maybe_cond(
        train_draft,
        partial(update, optimizers.draft),
        lambda _, state, draft, moves: (draft, state),
        *(gradients.draft, states.draft, params.draft, moves.draft),
    )
    return replace(params, policy=policy, draft=draft), Params(policy_state, draft_state)
