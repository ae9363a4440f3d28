"""The benchmark's cells count what they say."""

import numpy as np
import pytest

from benchmarks.networks import VOCAB, small
from benchmarks.never_slower import MESH, Cell, Job, measure
from launch.build import Networks
from specjax.drafters import NGramDrafter
from specjax.types import Params


@pytest.mark.slow
def test_a_cell_has_every_step_by_every_draft_length():
    random = small(1, MESH)
    networks = Networks(random.decoder, random.policy, NGramDrafter(VOCAB, 1, 1), Params(random.params.policy, {}))
    cell = measure(Job(networks, slots=2, budget=4, draft_lengths=(0, 2)), networks.params, steps=3, repeats=2)
    assert {name: len(seconds) for name, seconds in cell.seconds.items()} == {"0": 3, "2": 3, "auto": 3}
    assert len(cell.chosen) == len(cell.alpha) == 3 and min(cell.alpha) >= 1.0


def test_a_cell_compares_step_by_step():
    cell = Cell({"0": [2.0, 3.0], "2": [4.0, 2.0], "auto": [2.5, 2.0]}, chosen=[0, 2], alpha=[1.0, 1.5])
    assert cell.best == "0" and cell.over("0") == [0.8, 1.5] and cell.over("2") == [1.6, 1.0]


def test_a_lookup_is_tried_as_a_run_tries_it(monkeypatch: pytest.MonkeyPatch):
    """It starts with hope where its rounds cost little, and a head that has learnt nothing does not."""
    monkeypatch.setattr(Job, "seconds", np.array([[1.0, 1.2]], np.float32))
    random = small(1, MESH)
    lookup = Networks(random.decoder, random.policy, NGramDrafter(VOCAB, 1, 1), Params(random.params.policy, {}))
    for networks, first in ((lookup, 1), (random, 0)):
        job = Job(networks, slots=2, budget=4, draft_lengths=(0, 1))
        assert measure(job, networks.params, steps=1, repeats=1).chosen == [first]
