"""Supervised steps on worked solutions, for a policy that starts from scratch."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import WarmupConfig
from launch.data.problems import Problem
from launch.data.supervised import SupervisedBatch, supervised_batch
from launch.data.tokenizers import Tokenizer
from specjax.log_probs import teacher_forced, token_log_probs
from specjax.parallel.mesh import BATCH_AXES, finished
from specjax.sampling import SamplingLaw
from specjax.train.optimizer import init_moments, make_optimizer, update, usable
from specjax.types import Policy, PyTree


def warm_up(
    policy: Policy,
    params: PyTree,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    length: int,
    config: WarmupConfig,
    seed: int,
    mesh: Mesh,
    report: Callable[[int, float], None],
    logit_chunk: int = 0,
) -> PyTree:
    """The policy's parameters after `config.steps` steps of cross-entropy on the solutions.

    length: tokens of prompt and solution together. report: called with (step, loss) now and then.
    logit_chunk: as `TrainConfig` says.
    """
    optimizer = make_optimizer(config.optimizer)
    rows = NamedSharding(mesh, P(BATCH_AXES))

    def loss(params: PyTree, batch: SupervisedBatch) -> jax.Array:
        tokens = jnp.asarray(batch.tokens)
        log_p, _ = token_log_probs(params, teacher_forced(policy, params, tokens, logit_chunk), tokens, SamplingLaw())
        column = jnp.arange(1, length)[None]
        learnt = (column >= batch.prompt_lengths[:, None]) & (column < batch.lengths[:, None])
        return -jnp.sum(jnp.where(learnt, log_p, 0.0)) / jnp.sum(learnt, dtype=jnp.float32)

    def step(params: PyTree, moments: PyTree, batch: SupervisedBatch) -> tuple[PyTree, PyTree, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        params, moments = update(optimizer, gradient, moments, params, usable(gradient, value))
        return params, moments, value

    with jax.set_mesh(mesh):
        moments = init_moments(optimizer, params, mesh)
        layout = jax.tree.map(lambda x: x.sharding, (params, moments))
        jitted = jax.jit(step, in_shardings=(*layout, rows), out_shardings=(*layout, None), donate_argnums=(0, 1))
        for i in range(config.steps):
            batch = supervised_batch(problems, tokenizer, config.batch_size, length, seed, i)
            params, moments, value = finished(jitted(params, moments, jax.device_put(batch, rows)), mesh)
            if (i + 1) % 25 == 0 or i + 1 == config.steps:
                report(i + 1, float(value))
    return params
