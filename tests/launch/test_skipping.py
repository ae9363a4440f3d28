"""A run in which no update of the policy is finite."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.cli.options import parse_run
from launch.run.networks import restore_params
from launch.setup.experiment import Experiment, build_experiment
from specjax.train.batch import TrainBatch
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.train.optimizer import usable
from specjax.types import Params
from tests.launch.programs import LEAST, Options, argv, flags, metrics, saves, start

STEPS = 3
OPTIONS = LEAST | flags(
    "--draft.lookup.kind none --reward.scorer tests.launch.sample_scorers:beyond_squares --reward.workers 1",
    f"--rollout.group-size 8 --advantage.scale none --max-skipped {STEPS} --checkpoint.every 1000 --steps 1000",
)


def finite(experiment: Experiment, params: Params, batch: TrainBatch) -> Params:
    """Return for each network whether its gradient is finite."""
    networks, config = experiment.networks, experiment.config
    budget = config.rollout.max_new_tokens
    context = LossContext(networks.policy, networks.drafter, config.rollout.law, config.loss, budget=budget)
    found, sums = accumulate(context, params, batch)
    return Params(usable(found.policy, sums.policy.loss), usable(found.draft, sums.draft.loss))


@pytest.mark.slow
def test_a_run_of_skipped_updates_ends_with_its_batch_and_its_state_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: Options = OPTIONS | {"--out": str(run)}
    process = start("tiny", options, "--speedup.steps", "0")
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1].startswith(f"error: step {STEPS}: updates were skipped in {STEPS} steps in a row")
    lines = metrics(run)
    assert all(line["update/skipped"] == 1 and line["grad_norm/policy"] is None for line in lines)
    assert len(lines) in (STEPS, STEPS + 1)  # one more step may have been in progress
    assert saves(run) == [len(lines)]
    assert f"stopped after step {len(lines)}; --resume continues it\n" in out
    diary = (run / "diary.jsonl").read_text()
    assert "--resume continues it" in diary and "updates were skipped in" in diary

    experiment = build_experiment(parse_run([*argv("tiny", options), "--speedup.steps", "0"], "test", "a run"))
    params = restore_params(run, experiment)
    initial = experiment.networks.params.policy
    for here, there in zip(jax.tree.leaves(params.policy), jax.tree.leaves(initial), strict=True):
        np.testing.assert_array_equal(here, there)
    with np.load(run / f"skipped_step_{len(lines)}.npz") as saved:
        batch = TrainBatch(**{name: jnp.asarray(saved[name]) for name in saved.files if not name.startswith("prompt_")})
    assert np.isfinite(batch.advantage).all() and np.ptp(batch.reward) > 1e29
    # File and save show that the advantages are the cause.
    assert not finite(experiment, params, batch).policy and finite(experiment, params, batch).draft
    assert finite(experiment, params, replace(batch, advantage=batch.advantage * 1e-30)).policy
