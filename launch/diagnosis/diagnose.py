"""All checks of a draft, on the run's own networks and held-out prompts."""

from dataclasses import replace

import jax
import numpy as np

from configs.schema import RunConfig
from configs.schema.networks import LookupConfig
from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.data.batches import fixed_batches
from launch.diagnosis.alternatives import alternatives, is_predicted, make_overlaps
from launch.diagnosis.findings import (
    Diagnosis,
    acceptance_findings,
    alternative_findings,
    caches_finding,
    coverage_finding,
    rates,
)
from launch.diagnosis.observed import diagnostic_config, observe
from specjax.types import Params


def diagnostic_run(config: RunConfig) -> RunConfig:
    """Return the run in float32 on one data shard, without a lookup beside a draft.

    What differs in float32 is a fault and no rounding; what a lookup finds is no merit of the draft.
    """
    if not config.draft.proposes or not max(config.rollout.lengths):
        raise ConfigError(f"draft.kind = {config.draft.kind}: must propose tokens, at a rollout.draft_length above 0")
    lookup = config.draft.lookup if config.draft.kind == "none" else LookupConfig()
    mesh = replace(config.mesh, data=1, fsdp=1)
    model, draft = replace(config.model, dtype="float32"), replace(config.draft, lookup=lookup)
    return replace(config, model=model, draft=draft, mesh=mesh)


def diagnose(experiment: Experiment, params: Params, count: int) -> Diagnosis:
    """Generate up to `count` held-out prompts and check caches, acceptance, and how the draft is read."""
    networks, config = experiment.networks, diagnostic_config(experiment.config.rollout)
    table = experiment.held_out_prompts
    (prompts,) = fixed_batches(table.first(count), min(count, len(table.rows)))
    observed = observe(experiment, networks.drafter, params, prompts, config)
    if not is_predicted(networks.drafter):
        by_position, by_place = rates(observed, None)
        findings = [caches_finding(observed), *acceptance_findings(by_position, by_place)]
        return Diagnosis(findings, by_position, by_place)
    with jax.set_mesh(experiment.mesh):
        overlaps = make_overlaps(networks.policy, networks.drafter, config.law, config.draft_length)(params, observed)
        others = []
        for other in alternatives(networks):
            (overlap,) = make_overlaps(other.policy, other.drafter, config.law, 1)(params, observed)
            others.append((other.check, other.option, overlap))
    by_position, by_place = rates(observed, overlaps)
    # The head predicts no token of the completion before the third of its row.
    counted = observed.completion & (np.arange(observed.tokens.shape[1]) >= 2)
    findings = [caches_finding(observed), *acceptance_findings(by_position, by_place)]
    findings += alternative_findings(overlaps[0], others, counted)
    if networks.draft.target_ids is not None:
        findings.append(coverage_finding(networks.draft.target_ids, observed))
    return Diagnosis(findings, by_position, by_place)
