"""Supervised steps on worked solutions, before RL, for a policy that starts from scratch."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.build.experiment import Experiment
from launch.data.supervised import SupervisedBatch, check_supervised, supervised_batch
from specjax import kernels
from specjax.log_probs import teacher_forced, token_log_probs
from specjax.parallel.mesh import BATCH_AXES
from specjax.sampling import SamplingLaw
from specjax.train.optimizer import init_moments, make_optimizer, update, usable
from specjax.types import Params, PyTree

REPORT_EVERY = 25


def warm_up(experiment: Experiment, say: Callable[[str], None]) -> Params:
    """Return the networks as the recipe starts them, the policy after its `warmup.steps` supervised steps.

    A step minimises the cross-entropy of the solutions. say: told of the loss now and then.
    """
    config, policy, mesh, length = (
        experiment.config.warmup,
        experiment.networks.policy,
        experiment.mesh,
        _length(experiment),
    )
    if not config.steps:
        return experiment.networks.params
    optimizer, rows = make_optimizer(config.optimizer), NamedSharding(mesh, P(BATCH_AXES))

    def loss(params: PyTree, batch: SupervisedBatch) -> jax.Array:
        tokens = jnp.asarray(batch.tokens)
        output = teacher_forced(policy, params, tokens, experiment.config.logit_chunk)
        log_p, _ = token_log_probs(params, output, tokens, SamplingLaw())
        column = jnp.arange(1, length)[None]
        learnt = (column >= batch.prompt_lengths[:, None]) & (column < batch.lengths[:, None])
        return -jnp.sum(jnp.where(learnt, log_p, 0.0)) / jnp.sum(learnt, dtype=jnp.float32)

    def step(params: PyTree, moments: PyTree, batch: SupervisedBatch) -> tuple[PyTree, PyTree, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        params, moments = update(optimizer, gradient, moments, params, usable(gradient, value))
        return params, moments, value

    problems, seed, params = experiment.problems.train, experiment.config.seed, experiment.networks.params.policy
    with jax.set_mesh(mesh):
        moments = init_moments(optimizer, params, mesh)
        layout = jax.tree.map(lambda x: x.sharding, (params, moments))
        jitted = jax.jit(step, in_shardings=(*layout, rows), out_shardings=(*layout, None), donate_argnums=(0, 1))
        for i in range(config.steps):
            batch = supervised_batch(problems, experiment.tokenizer, config.batch_size, length, seed, i)
            params, moments, value = kernels.finished(jitted(params, moments, jax.device_put(batch, rows)), mesh)
            if (i + 1) % REPORT_EVERY == 0 or i + 1 == config.steps:
                say(f"warm-up step {i + 1}: loss {float(value):.3f}")
    return replace(experiment.networks.params, policy=params)


def check_warmup(experiment: Experiment) -> None:
    """Raise ConfigError if the recipe has supervised steps that its problems do not allow."""
    batch_size = experiment.config.warmup.batch_size
    if experiment.config.warmup.steps:
        check_supervised(experiment.problems.train, experiment.tokenizer, batch_size, _length(experiment))


def _length(experiment: Experiment) -> int:
    """Return the most tokens of a problem with its solution."""
    return experiment.config.data.max_prompt_tokens + experiment.config.rollout.max_new_tokens
