"""What the programs that write a draft state of it."""

from pathlib import Path

from launch.acceptance import Acceptance
from launch.report.read import read_run
from launch.run_directory import METRICS_FILE, saved_step
from models.config import DecoderConfig
from models.made_for import MadeFor
from specjax.checkpoint import Which


def of_distillation(policy: str | None, decoder: DecoderConfig, measured: Acceptance) -> MadeFor:
    """Of a draft distilled from `policy`, the directory of one or of a run, as it was measured afterwards."""
    # At temperature 0 a run measures another acceptance than is measured here, one of the laws at temperature 1.
    predicted = measured.predicted if measured.temperature > 0 else None
    return MadeFor(policy, decoder.hidden_size, decoder.num_layers, measured.temperature, predicted)


def of_run(directory: Path, which: Which, decoder: DecoderConfig) -> MadeFor | None:
    """Of the draft in a run's save, by what the run has recorded; None where its records are lost.

    The acceptance is that of the step that was saved; a save before the first step has none.
    """
    if not (directory / METRICS_FILE).is_file():
        return None
    run = read_run(directory)
    steps, values = run.measured("draft/predicted_acceptance")
    predicted = values[steps == saved_step(directory, which)].tolist()
    temperature = run.config["rollout"]["law"]["temperature"]
    return MadeFor(str(directory), decoder.hidden_size, decoder.num_layers, temperature, next(iter(predicted), None))
