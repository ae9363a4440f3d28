"""The benchmark's cells count what they say."""

import pytest

from benchmarks.networks import VOCAB, small
from benchmarks.never_slower import MESH, Job, measure
from launch.build import Networks
from specjax.drafters import NGramDrafter
from specjax.types import Params


@pytest.mark.slow
def test_a_cell_has_every_step_by_every_draft_length():
    random = small(1, MESH)
    networks = Networks(random.decoder, random.policy, NGramDrafter(VOCAB, 1, 1), Params(random.params.policy, {}))
    cell = measure(Job(networks, slots=2, budget=4, draft_lengths=(0, 2)), networks.params, steps=3, repeats=2)
    assert {name: len(seconds) for name, seconds in cell.seconds.items()} == {"0": 3, "2": 3, "auto": 3}
    assert cell.chosen[0] == 0 and len(cell.chosen) == len(cell.alpha) == 3 and cell.best in ("0", "2")
    assert cell.over("auto") == [1.0, 1.0, 1.0]
