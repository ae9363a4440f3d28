"""Report of a diagnosis in plain words: the options it used, what it found, and what to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.diagnosis.acceptance import Rate
from launch.diagnosis.findings import LOW, Finding
from launch.setup.drafts.base import MORE_TRAINING
from launch.setup.experiment import Experiment

# Options of the run that a diagnosis may change.
CHANGEABLE = ("model.dtype", "model.path", "draft.lookup", "rollout", "mesh")


@dataclass(frozen=True)
class Diagnosis:
    """Result of all checks.

    Attributes:
        findings:    one or more findings per check.
        by_position: acceptance by position in the draft.
        by_place:    acceptance at position 1, by place in the completion.
        trainable:   True if the draft has parameters.
    """

    findings: list[Finding]
    by_position: list[Rate]
    by_place: list[Rate]
    trainable: bool

    @property
    def faults(self) -> list[Finding]:
        """Return the findings that are off."""
        return [finding for finding in self.findings if finding.state == "off"]

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and `ok`: True if nothing is off."""
        return asdict(self) | {"ok": not self.faults}


def print_setting(
    experiment: Experiment,
    checkpoint: str | None,
    step: int | None,
    prompts: int,
    changed: Sequence[tuple[str, Any, Any]],
    console: Console,
) -> None:
    """Print which networks are checked, and how. changed: (name, value, the run's value) of options that differ."""
    rollout, count = experiment.config.rollout, min(prompts, len(experiment.held_out_prompts.rows))
    console.print("networks: " + ("as the recipe starts them" if step is None else f"{checkpoint}, step {step}"))
    console.print(
        f"generation: {count * rollout.group_size} completions of {count} held-out prompts, at most "
        f"{rollout.max_new_tokens} tokens each, temperature {rollout.law.temperature:g}, verifier {rollout.verifier}, "
        f"draft length {rollout.draft_length}"
    )
    if experiment.networks.drafter.memory is not None:
        console.print("The drafter's memory of earlier rollouts is left out, so the run itself may accept more.")
    for name, value, recorded in changed:
        console.print(f"unlike the run: {name} = {value} (the run: {recorded})")


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the rates, the findings, and what to do."""
    table = Table("acceptance", "tokens", "measured", "predicted", box=None)
    for rate in [*diagnosis.by_position, *diagnosis.by_place]:
        predicted = "-" if rate.predicted is None else f"{rate.predicted:.2f}"
        table.add_row(rate.name, str(rate.count), f"{rate.measured:.2f}", predicted + (" OFF" if rate.is_off else ""))
    console.print(table)
    for finding in diagnosis.findings:
        label = "OFF" if finding.state == "off" else finding.state
        console.print(f"{label:11}  {finding.check}: {finding.said}")
    for finding in diagnosis.faults:
        console.print(f"{finding.check} is off: {finding.do}.")
    if not diagnosis.faults:
        console.print(_without_faults(diagnosis))


def _without_faults(diagnosis: Diagnosis) -> str:
    all_ok = all(finding.state == "ok" for finding in diagnosis.findings)
    result = "Nothing is off." if all_ok else "Nothing was found to be off, but not every check could decide."
    agreement = diagnosis.by_position[0].predicted
    if not diagnosis.trainable or agreement is None or agreement >= LOW:
        return result
    return f"{result} The overlap of draft and policy is only {agreement:.2f}: the draft needs {MORE_TRAINING}."
