"""Warm-up: supervised steps on worked solutions before RL, for a policy that starts from scratch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.data.responses import Answers, worked_solutions
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from specjax import kernels
from specjax.adapters import joined
from specjax.log_probs import teacher_forced, token_log_probs
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES
from specjax.sampling import SamplingLaw
from specjax.train.batch import Sequences
from specjax.train.optimizer import init_moments, make_optimizer, update, usable
from specjax.types import Params, PyTree


def warm_up(experiment: Experiment) -> Params:
    """Return the recipe's networks, with the policy after `warmup.steps` supervised steps.

    A step minimises the cross-entropy of the solutions. Raises Stopped at a signal.
    """
    config, policy, mesh = experiment.config.warmup, experiment.networks.policy, experiment.mesh
    if not config.steps:
        return experiment.networks.params
    optimizer, rows = make_optimizer(config.optimizer), NamedSharding(mesh, P(BATCH_AXES))

    def loss(trained: PyTree, base: PyTree, batch: Sequences) -> jax.Array:
        params = joined(Params(trained, {}, base=base)).policy
        output = teacher_forced(policy, params, batch.tokens, experiment.config.logit_chunk)
        log_p, _ = token_log_probs(params, output, batch.tokens, SamplingLaw())
        learnt = batch.completion[:, 1:]
        return -jnp.sum(jnp.where(learnt, log_p, 0.0)) / jnp.sum(learnt, dtype=jnp.float32)

    def step(params: PyTree, moments: PyTree, base: PyTree, batch: Sequences) -> tuple[PyTree, PyTree, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, base, batch)
        params, moments = update(optimizer, gradient, moments, params, usable(gradient, value))
        return params, moments, value

    solutions, seed, start = _solutions(experiment), experiment.config.seed, experiment.networks.params
    params, base = start.policy, start.base
    with jax.set_mesh(mesh):
        moments = init_moments(optimizer, params, mesh)
        *layout, frozen = jax.tree.map(lambda x: x.sharding, (params, moments, base))
        jitted = jax.jit(
            step, in_shardings=(*layout, frozen, rows), out_shardings=(*layout, None), donate_argnums=(0, 1)
        )
        with long_phase("warm-up", config.steps, "steps") as phase:
            params, moments = phase.restore("networks", (params, moments))
            for i in range(phase.done, config.steps):
                batch = solutions.draw(config.batch_size, seed, i)
                placed = processes.place(batch, rows)
                params, moments, value = kernels.finished(jitted(params, moments, base, placed), mesh)
                tokens = int(np.sum(batch.completion))
                phase.finish({"networks": (params, moments)}, tokens=tokens, note=f"loss {float(value):.3f}")
    return replace(start, policy=params)


def check_warmup(experiment: Experiment) -> None:
    """Raise ConfigError if the recipe has warm-up steps that its problems do not allow."""
    if experiment.config.warmup.steps:
        _solutions(experiment)


def _solutions(experiment: Experiment) -> Answers:
    config, problems = experiment.config, experiment.problems.train
    if not 0 < config.warmup.batch_size <= len(problems):
        raise ConfigError(
            f"warmup.batch_size = {config.warmup.batch_size}: must be between 1 and {len(problems)}, the number of "
            "problems"
        )
    length = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return worked_solutions(problems, experiment.tokenizer, length, experiment.networks.policy.vocab_size)
