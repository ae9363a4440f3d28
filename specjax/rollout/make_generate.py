"""Rollouts compiled for a mesh, for evaluation and serving."""

from typing import NamedTuple

from jax.sharding import Mesh

from specjax.drafters import Drafter
from specjax.keys import SeedStep, seed_step
from specjax.program import Program
from specjax.rollout.generate import Choice, RolloutFn, abstract_prompts, per_shard, place, prepare
from specjax.rollout.host_turns import HostTurns, check_rollout_fn
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params, Policy, Prompts, Rollout


class GenerateProgram(NamedTuple):
    """Compiled function (params, prompts, seed_step, chosen=None) -> Rollout: see `make_generate`."""

    program: Program[Rollout]
    mesh: Mesh

    def __call__(self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice = None) -> Rollout:
        return self.program(params, place(prompts, self.mesh), seed_step, chosen)

    def start_compiling(self, params: Params, prompts: Prompts) -> None:
        """Start to compile for such parameters and prompts, as `Program.start_compiling`; without `chosen`."""
        self.program.start_compiling(params, abstract_prompts(prompts, self.mesh), seed_step(0, 0), None)


def make_generate(
    policy: Policy,
    drafter: Drafter,
    config: RolloutConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
) -> GenerateProgram | HostTurns:
    """Return a compiled function (params, prompts, seed_step, chosen=None) -> Rollout, for evaluation and serving.

    With an environment on the host it is several programs; raises ValueError for a rollout function of your own then.
    It cannot be traced into another program: on CPUs jax raises ValueError, because compiler options belong to a
    whole program.
    """
    if config.answers_on_host:
        check_rollout_fn(rollout_fn)
        return HostTurns(policy, drafter, config, mesh)
    generate = per_shard(rollout_fn, policy, drafter, config, mesh)

    def run(params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice) -> Rollout:
        return generate(prepare(policy, drafter, params), prompts, seed_step, chosen)

    return GenerateProgram(Program(run, mesh, compute_dtype=policy.dtype), mesh)
