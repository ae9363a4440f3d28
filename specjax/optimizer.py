"""One optax chain for each network."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from specjax.adaptation import when
from specjax.types import Params, PyTree


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW behind a clip of the global gradient norm.

    Attributes:
        learning_rate: reached after a linear warm-up.
        warmup_steps:  steps of that warm-up; 0 starts at the full rate.
        b1:            decay of the first moment.
        b2:            decay of the second moment.
        weight_decay:  decoupled, in units of the learning rate.
        clip_norm:     ceiling of the gradient's global norm.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0 and finite")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be in [0, 1)")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm = {self.clip_norm}: must be > 0")


def make_optimizer(c: OptimizerConfig, steps: int | None = None) -> optax.GradientTransformation:
    """The chain for one network. With `steps`, the rate falls behind the warm-up, by a cosine to zero in that step."""
    schedule = optax.linear_schedule(c.learning_rate / (c.warmup_steps + 1), c.learning_rate, c.warmup_steps)
    if steps is not None:
        fall = optax.cosine_decay_schedule(c.learning_rate, max(steps - c.warmup_steps, 1))
        schedule = optax.join_schedules((schedule, fall), (c.warmup_steps,))
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(schedule, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay),
    )


def init_moments(optimizer: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
    """The optimiser's state on the mesh: moments laid out as their parameters, counters everywhere."""
    everywhere = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(params))


def update(
    optimizer: optax.GradientTransformation, gradient: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """(params, optimiser state) after one step of one network."""
    # optax mixes weakly typed scalars into every transform, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def make_optimizers(policy: OptimizerConfig, draft: OptimizerConfig | None) -> Params:
    """A chain for each network, as `Params` of optax transformations; without a config the draft stands still."""
    return Params(make_optimizer(policy), optax.set_to_zero() if draft is None else make_optimizer(draft))


def apply_gradients(
    optimizers: Params, gradients: Params, states: Params, params: Params, train_draft: bool | Bool[Array, ""] = True
) -> tuple[Params, Params]:
    """(params, optimiser states) after one update of each network by its own chain; without `train_draft` the draft and
    its moments stand still.
    """
    policy, policy_state = update(optimizers.policy, gradients.policy, states.policy, params.policy)
    draft, draft_state = when(
        train_draft,
        partial(update, optimizers.draft),
        lambda _, state, draft: (draft, state),
        *(gradients.draft, states.draft, params.draft),
    )
    return Params(policy, draft, params.memory), Params(policy_state, draft_state)
