"""All checks of a draft, on the run's own networks and held-out prompts."""

from dataclasses import replace

import jax
import numpy as np

from configs.schema import LookupConfig, RunConfig
from launch.acceptance.predicted import is_predicted, make_overlaps
from launch.data.batches import fixed_batches
from launch.diagnosis.acceptance import acceptance_findings, rates
from launch.diagnosis.alternatives import alternatives
from launch.diagnosis.findings import alternative_findings, caches_finding, coverage_finding
from launch.diagnosis.observed import observe
from launch.diagnosis.summary import Diagnosis
from launch.errors import ConfigError
from launch.predict.refusals import check_rollout
from launch.setup.experiment import Experiment
from specjax.adapters import joined
from specjax.drafters.distillation import MOST_PASSES
from specjax.parallel import processes
from specjax.train.selection import SelectionConfig
from specjax.train.updates import UpdateConfig
from specjax.types import Params

# Rows decoded together. Few, because two copies of their float32 caches are in memory.
ROWS = 4


def diagnostic_run(config: RunConfig) -> RunConfig:
    """Return the run with the options that the diagnosis needs.

    - float32, so that differences are faults, not rounding.
    - One data shard. Weights are still split over fsdp and tensor.
    - No lookup beside a draft, because tokens that it finds say nothing about the draft.
    - The run's longest draft length, at most MOST_PASSES; verifier `rejection`; a temperature above 0, and no
      truncation. Training predicts acceptance only for these.
    - One sample per prompt, unless the drafter reads the other samples.
    """
    draft, rollout = config.draft, config.rollout
    if not draft.proposes or not max(rollout.lengths):
        raise ConfigError(f"draft.kind = {draft.kind}: must propose tokens, at a rollout.draft_length above 0")
    lookup = draft.lookup if draft.kind == "none" else LookupConfig()
    rollout = replace(
        rollout,
        group_size=rollout.group_size if lookup.kind == "history" else 1,
        draft_length=min(max(rollout.lengths), MOST_PASSES),
        draft_lengths=(),
        phases=(),
        verifier="rejection",
        law=rollout.law.without_cuts(),
        carry_over=None,
        max_age=None,
    )
    return replace(
        config,
        model=replace(config.model, dtype="float32"),
        draft=replace(draft, lookup=lookup),
        rollout=rollout,
        mesh=replace(config.mesh, data=1),
        # Nothing is trained, so no batch needs to divide.
        microbatches=1,
        updates=UpdateConfig(),
        selection=SelectionConfig(),
    )


def diagnose(experiment: Experiment, params: Params, count: int) -> Diagnosis:
    """Check the draft of a `diagnostic_run` on completions of up to `count` held-out prompts."""
    # Otherwise GPUs may multiply float32 matrices in TF32, which has little more precision than bfloat16.
    with jax.default_matmul_precision("highest"):
        return _diagnose(experiment, params, count)


def _diagnose(experiment: Experiment, params: Params, count: int) -> Diagnosis:
    networks, config, params = experiment.networks, experiment.config.rollout, joined(params)
    table, law, chunk = experiment.held_out_prompts, config.law, experiment.config.logit_chunk
    prompts = min(max(ROWS // config.group_size, 1), count, len(table.rows))
    rows = {"prompts": prompts, "rollout.group_size": config.group_size}
    check_rollout(experiment, config, (prompts, table.width), rows)
    batches = fixed_batches(table.first(count), prompts)
    observed, comparison = observe(experiment, networks.drafter, params, batches, config)
    sequences, caches, predicts = observed.sequences, caches_finding(comparison), is_predicted(networks.drafter)
    overlaps, others = None, []
    with jax.set_mesh(experiment.mesh):
        if predicts:
            overlaps = make_overlaps(networks.policy, networks.drafter, law, config.draft_length, chunk)(
                params, sequences
            )
        for other in alternatives(networks):
            (overlap,) = make_overlaps(other.policy, other.drafter, law, 1, chunk)(params, sequences)
            others.append((other.check, other.option, overlap))
    by_position, by_place = rates(observed, overlaps)
    findings = [caches, *(finding.explained_by(caches) for finding in acceptance_findings(by_position, by_place))]
    if overlaps is not None:
        # The head makes no prediction for the first two tokens of a row.
        counted = processes.fetch(sequences.completion) & (np.arange(sequences.tokens.shape[1]) >= 2)
        findings += alternative_findings(overlaps[0], others, counted)
    if networks.draft.target_ids is not None:
        findings.append(coverage_finding(networks.draft.target_ids, observed))
    return Diagnosis(findings, by_position, by_place, networks.draft.has_params)
