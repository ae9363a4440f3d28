"""The table of costs that a run is given."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch.cli.errors import ConfigError
from launch.costs.cost_table import CostTable, load_cells
from specjax.cost import Cell
from specjax.rollout.plan import Phase, RolloutConfig

CELL = {"slots": 8, "window": 40, "draft_length": 0, "seconds": 0.5}
HERE = (Phase(8, 40),), (0, 2)
OTHER = CELL | {"draft_length": 2, "seconds": 1}


def table(directory: Path, text: str) -> Path:
    path = directory / "table.json"
    path.write_text(text)
    return path


def test_a_table_is_read(tmp_path: Path):
    kept = {"cells": [CELL, OTHER, CELL | {"step": 7}], "model": {"fixed": 0.1}}
    assert load_cells(table(tmp_path, json.dumps(kept)), *HERE) == [
        Cell(8, 40, 0, 0.5),
        Cell(8, 40, 2, 1),
        Cell(8, 40, 0, 0.5, 7),
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{}]}', '{"cells": [{"slots": 8}]}', "\0"]
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match=r"^cost_table = .*table\.json: no table of costs: "):
        load_cells(table(tmp_path, text), *HERE)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": 0}, "slots = 0: must be an integer of at least 1"),
        ({"slots": "8"}, "slots = '8': must be an integer of at least 1"),
        ({"slots": True}, "slots = True: must be an integer of at least 1"),
        ({"window": 8.5}, "window = 8.5: must be an integer of at least 1"),
        ({"draft_length": -1}, "draft_length = -1: must be an integer of at least 0"),
        ({"step": 0.5}, "step = 0.5: must be an integer of at least 0"),
        ({"seconds": 0}, "seconds = 0: must be > 0 and finite"),
        ({"seconds": -0.1}, "seconds = -0.1: must be > 0 and finite"),
        ({"seconds": float("nan")}, "seconds = nan: must be > 0 and finite"),
        ({"seconds": float("inf")}, "seconds = inf: must be > 0 and finite"),
        ({"seconds": None}, "seconds = None: must be > 0 and finite"),
    ],
)
def test_a_cell_that_was_never_measured_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    path = table(tmp_path, json.dumps({"cells": [CELL, OTHER | change]}))
    with pytest.raises(ConfigError) as error:
        load_cells(path, *HERE)
    assert str(error.value) == f"cost_table = {path}: {message}"


@pytest.mark.parametrize("cells", [[], [CELL], [CELL, CELL | {"seconds": 0.6}], [CELL, OTHER | {"step": 5}]])
def test_too_few_cells_for_a_model_are_refused(tmp_path: Path, cells: list[dict[str, float]]):
    path = table(tmp_path, json.dumps({"cells": cells}))
    with pytest.raises(ConfigError) as error:
        load_cells(path, *HERE)
    count = sum("step" not in cell for cell in cells)
    assert str(error.value) == f"cost_table = {path}: {count} cells of step 0: must be of two different rounds at least"


class FakeTimer:
    """Rounds take longer every time they are measured."""

    def __init__(self) -> None:
        self._times = itertools.count(1)

    def measure(self, _: object, step: int) -> list[Cell]:
        time = next(self._times)
        return [Cell(8, 40, 0, time, step), Cell(8, 40, 2, 2 * time + time**2, step)]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("launch.costs.cost_table.cell_timer", lambda _: FakeTimer())
    return SimpleNamespace(
        phases=(Phase(8, 40),),
        train=SimpleNamespace(rollout=RolloutConfig(draft_lengths=(0, 2))),
    )


def test_cells_that_leave_a_round_without_cost_are_refused(tmp_path: Path):
    """Of another run, which only ever drafted: seconds in proportion to the draft length."""
    drafting = [CELL | {"draft_length": 1, "seconds": 1}, CELL | {"draft_length": 3, "seconds": 3}]
    path = table(tmp_path, json.dumps({"cells": drafting}))
    with pytest.raises(ConfigError) as error:
        load_cells(path, *HERE)
    assert str(error.value) == (
        f"cost_table = {path}: its cells give a round of 8 slots of 40 positions at draft length 0 no cost: "
        "must be of rounds more like it"
    )


def test_a_run_that_is_resumed_or_replayed_sees_the_costs_that_it_saw(experiment: Any, tmp_path: Path):
    """Killed behind the probe of step 4, and resumed from a save of step 3."""
    path = tmp_path / "cost_table.json"
    whole = CostTable(experiment, path, [], replayed=False)
    first, saved = whole.update(None, 0), list(whole.cells)  # pyright: ignore[reportArgumentType]
    assert whole.changes(4, True) and not whole.changes(4, False)
    second = whole.update(None, 4)  # pyright: ignore[reportArgumentType]
    assert (first != second).any()

    resumed = CostTable(experiment, path, [], replayed=False)
    resumed.resume(saved, 3)
    assert resumed.changes(4, False) and resumed.changes(5, True)
    replayed = CostTable(experiment, tmp_path / "other.json", load_cells(path, *HERE), replayed=True)
    assert replayed.changes(4, False) and not replayed.changes(5, True)
    for table in (resumed, replayed):
        np.testing.assert_array_equal(table.update(None, 0), first)  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(table.update(None, 4), second)  # pyright: ignore[reportArgumentType]
        assert table.cells == whole.cells
