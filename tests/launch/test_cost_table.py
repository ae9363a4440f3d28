"""Cost tables that a run reads."""

import itertools
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from launch.costs.cost_table import CostTable, load_cells
from launch.errors import ConfigError
from specjax.cost import Acceptance, Cell, Drafting, init_drafting, unmeasured
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.types import Params
from tests.refusals import refuses

CELL = {"slots": 8, "window": 40, "draft_length": 0, "seconds": 0.5}
HERE = (Phase(8, 40),), (0, 2)
OTHER = CELL | {"draft_length": 2, "seconds": 1}
# From a run that always drafted: seconds are proportional to the draft length.
DRAFTING = [CELL | {"draft_length": k, "seconds": k} for k in (1, 3)]


def load(directory: Path, cells: Any) -> list[Cell]:
    path = directory / "table.json"
    path.write_text(cells if isinstance(cells, str) else json.dumps({"cells": cells, "model": {"fixed": 0.1}}))
    return load_cells(path, *HERE)


def test_a_table_is_read(tmp_path: Path):
    expected = [Cell(8, 40, 0, 0.5), Cell(8, 40, 2, 1), Cell(8, 40, 0, 0.5, 7)]
    assert load(tmp_path, [CELL, OTHER, CELL | {"step": 7}]) == expected


@pytest.mark.parametrize(
    "cells, message",
    [
        *((text, "not a cost table") for text in ("", "[]", "{}", "\0")),
        *((cells, "not a cost table") for cells in (3, [3], [{}], [{"slots": 8}])),
        ([OTHER | {"slots": 0}], "slots = 0"),
        ([OTHER | {"slots": "8"}], "slots = '8'"),
        ([OTHER | {"slots": True}], "slots = True"),
        ([OTHER | {"window": 8.5}], "window = 8.5"),
        ([OTHER | {"draft_length": -1}], "draft_length = -1"),
        ([OTHER | {"step": 0.5}], "step = 0.5"),
        *(([OTHER | {"seconds": value}], f"seconds = {value}") for value in (0, float("nan"), float("inf"), None)),
        ([CELL, CELL | {"seconds": 0.6}], "2 cells of step 0"),
        ([CELL, OTHER | {"step": 5}], "1 cells of step 0"),
        ([], "0 cells of step 0"),
        (DRAFTING, "its cells give a round of 8 slots of 40 positions at draft length 0 no cost"),
    ],
)
def test_a_table_that_no_model_can_be_fitted_to_is_refused(tmp_path: Path, cells: Any, message: str):
    with refuses(f"cost_table = ...table.json: {message}", ConfigError):
        load(tmp_path, cells)


class FakeTimer:
    """Timer that returns longer times at every call."""

    def __init__(self) -> None:
        self._times = itertools.count(1)

    def measure(self, _: object, step: int) -> list[Cell]:
        time = next(self._times)
        return [Cell(8, 40, 0, time, step), Cell(8, 40, 2, 2 * time + time**2, step)]


def drafting(predicted: float) -> Drafting:
    acceptance = Acceptance(jnp.zeros(2), jnp.zeros(2), jnp.float32(predicted))
    return replace(init_drafting(HERE[1], np.ones((1, 2))), acceptance=acceptance)


@pytest.mark.parametrize("later", [False, True], ids=["at the start", "later"])
def test_a_resumed_or_replayed_run_uses_the_recorded_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
):
    """The run measures at its start or before step 3, and at the probe of step 4. It is resumed from a save before."""
    monkeypatch.setattr("launch.costs.cost_table.cell_timer", lambda _: FakeTimer())
    experiment: Any = SimpleNamespace(
        phases=HERE[0],
        config=SimpleNamespace(rollout=RolloutConfig(draft_lengths=HERE[1]), draft_training=DraftTrainingConfig()),
        networks=SimpleNamespace(policy=SimpleNamespace(mixture=None), draft=SimpleNamespace(has_params=True)),
    )
    path, params, first_step = tmp_path / "cost_table.json", Params({}, {}), 3 if later else 0
    path.write_text("of an attempt without a checkpoint")
    whole, low, high = CostTable(experiment, path, [], replayed=False), drafting(0.1), drafting(0.2)
    first = whole.start(params, later)
    saved = list(whole.cells)
    assert path.exists() == bool(saved) != later
    if later:
        np.testing.assert_array_equal(first, [[1, np.inf]])
        # Steps 1 and 2 train the draft.
        assert [whole.changes(step, True, low) for step in (1, 2, 3)] == [False] * 3
        assert [whole.changes(step, False, high) for step in (1, 2, 3, 4)] == [False, True, True, False]
        lookup = SimpleNamespace(**vars(experiment) | {"networks": deepcopy(experiment.networks)})
        lookup.networks.draft.has_params = False
        assert CostTable(lookup, path, [], replayed=False).changes(4, False, high)
        first = whole.update(params, 3)
    assert whole.changes(4, True, low) and not whole.changes(4, False, high)
    second = whole.update(params, 4)
    assert np.isfinite(first).all() and (first != second).any()

    resumed = CostTable(experiment, path, [], replayed=False)
    seconds = unmeasured(1, HERE[1]) if later else first
    for table in (resumed, CostTable(experiment, path, [Cell(**CELL, step=3)], replayed=True)):
        table.resume(saved, 2, replace(low, seconds=jnp.asarray(seconds)))
        assert table.used != later
    assert resumed.changes(4, False, low) and resumed.changes(5, True, low)
    # A probe before the first cells changed nothing in the run before.
    assert resumed.changes(2, True, low) != later
    replayed = CostTable(experiment, tmp_path / "other.json", load_cells(path, *HERE), replayed=True)
    assert replayed.changes(4, False, low) and not replayed.changes(5, True, high)
    assert np.isfinite(replayed.start(params, later)).all() != later
    for table in (resumed, replayed):
        assert table.changes(first_step, False, low) and not table.changes(2, False, high)
        np.testing.assert_array_equal(table.update(params, first_step), first)
        np.testing.assert_array_equal(table.update(params, 4), second)
        assert table.cells == whole.cells
    # An asynchronous run begins with the costs of a run that measured later.
    np.testing.assert_array_equal(replayed.start(params, False), first)
