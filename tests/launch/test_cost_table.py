"""Cost tables that a run reads."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch.cli.errors import ConfigError
from launch.cli.long_phases import LongPhases
from launch.costs.cost_table import CostTable, load_cells
from specjax.cost import Cell
from specjax.rollout.plan import Phase, RolloutConfig
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

    def measure(self, _: object, step: int, long_phases: LongPhases) -> list[Cell]:
        time = next(self._times)
        return [Cell(8, 40, 0, time, step), Cell(8, 40, 2, 2 * time + time**2, step)]


def test_a_resumed_or_replayed_run_uses_the_recorded_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run is killed after the probe of step 4, and resumed from the save of step 3."""
    monkeypatch.setattr("launch.costs.cost_table.cell_timer", lambda _: FakeTimer())
    experiment: Any = SimpleNamespace(
        phases=HERE[0],
        config=SimpleNamespace(rollout=RolloutConfig(draft_lengths=HERE[1])),
        networks=SimpleNamespace(policy=SimpleNamespace(mixture=None)),
    )
    path, params = tmp_path / "cost_table.json", Params({}, {})
    whole = CostTable(experiment, path, [], replayed=False)
    first, saved = whole.update(params, 0), list(whole.cells)
    assert whole.changes(4, True) and not whole.changes(4, False)
    second = whole.update(params, 4)
    assert (first != second).any()

    resumed = CostTable(experiment, path, [], replayed=False)
    resumed.resume(saved, 3)
    assert resumed.changes(4, False) and resumed.changes(5, True)
    replayed = CostTable(experiment, tmp_path / "other.json", load_cells(path, *HERE), replayed=True)
    assert replayed.changes(4, False) and not replayed.changes(5, True)
    for table in (resumed, replayed):
        np.testing.assert_array_equal(table.update(params, 0), first)
        np.testing.assert_array_equal(table.update(params, 4), second)
        assert table.cells == whole.cells
