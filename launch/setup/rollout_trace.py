"""Trace of a rollout, by which a rollout function of one's own is checked before anything is compiled."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import Mesh

from launch.cli.functions import refusing_errors
from launch.errors import ConfigError, first_line
from launch.setup.experiment import Experiment
from specjax.carry_over.groups import nothing_carried
from specjax.carry_over.rollout import carry_over, carry_over_fn
from specjax.keys import SeedStep
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import Choice, per_shard, prepare
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.types import Params, Prompts, Rollout


def trace_rollout(
    experiment: Experiment, config: RolloutConfig, prompts: int, mesh: Mesh, training: bool = False
) -> Rollout:
    """Return the shapes and dtypes of a rollout of `prompts` prompts. Traces it, compiles and runs nothing.

    mesh: devices that generate it: `rollout_mesh` in training steps, otherwise `mesh`.
    training: it is the rollout of a training step; no other carries sequences over.

    Raises ConfigError if the rollout function raises or calls the host, or if its tokens or lengths have wrong
    shapes.
    """
    width, networks = experiment.prompt_width, experiment.networks
    policy, drafter, params = networks.policy, networks.drafter, networks.params
    rows = prompts * config.group_size
    phases = len(lay_out(config, rows // batch_shards(mesh), width))
    name, step = experiment.config.rollout.function, jax.ShapeDtypeStruct((), jnp.int32)
    draft_length_indices = jax.ShapeDtypeStruct((phases,), jnp.int32) if config.draft_lengths else None

    def run(params: Params, prompts: Prompts, seed_step: SeedStep, choice: Choice) -> Rollout:
        carried = nothing_carried(config, (len(prompts.lengths), width)) if training else None
        rollout_fn = experiment.rollout_fn if carried is None else carry_over_fn(experiment.rollout_fn)
        generate = per_shard(rollout_fn, policy, drafter, config, mesh)
        if carried is not None:
            generate = carry_over(generate, carried, seed_step[1])
        return generate(prepare(policy, drafter, params), prompts, seed_step, choice)

    refusing = nullcontext() if name is None else refusing_errors("rollout.function", name, "return a Rollout")
    try:
        with refusing, jax.set_mesh(mesh):
            args = replace(params, memory=()), experiment.abstract_prompts(prompts), (step, step), draft_length_indices
            jaxpr, rollout = jax.make_jaxpr(run, return_shape=True)(*args)
            if not isinstance(rollout, Rollout):
                raise TypeError(f"returned {type(rollout).__name__}")
    except (TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        if mesh != experiment.mesh:
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
