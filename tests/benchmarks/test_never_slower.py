"""The benchmark's cells hold the right numbers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.networks import VOCAB, small
from benchmarks.never_slower import MESH, DraftCell, Job, measure
from launch.setup.networks import Networks
from specjax.drafters import NGramDrafter
from specjax.types import Params


@pytest.mark.slow
def test_a_cell_has_every_step_at_every_draft_length():
    random = small(1, MESH)
    networks = Networks(random.decoder, random.policy, NGramDrafter(VOCAB, 1, 1), Params(random.params.policy, {}))
    cell = measure(Job(networks, slots=2, budget=4, draft_lengths=(0, 2)), networks.params, steps=3, repeats=2)
    assert {k: len(ratios) for k, ratios in cell.over.items()} == {0: 3, 2: 3}
    assert len(cell.chosen) == len(cell.alpha) == 3 and min(cell.alpha) >= 1.0


def test_the_best_fixed_length_is_the_closest_to_the_automatic_choice():
    assert DraftCell({0: [0.8, 1.5], 1: [1.4, 1.4], 2: [1.6, 0.9]}, chosen=[0, 2], alpha=[1.0, 1.5]).best == 0
    assert DraftCell({0: [1.2, 1.5], 1: [1.4, 1.4], 2: [1.6, 0.9]}, chosen=[0, 2], alpha=[1.0, 1.5]).best == 2


def test_a_step_is_the_mean_of_its_pairs(monkeypatch: pytest.MonkeyPatch):
    """Plain decoding that takes twice as long, then half as long, as itself has a ratio of 1."""
    took, rollout = iter([2.0, 1.0, 4.0, 2.0]), SimpleNamespace(lengths=np.array([4]), row_rounds=np.array([3]))
    monkeypatch.setattr("benchmarks.never_slower.time_call", lambda run: next(took))
    monkeypatch.setattr("benchmarks.never_slower.update_drafting", lambda drafting, *_: drafting)
    monkeypatch.setattr(Job, "seconds", np.array([[1.0]], np.float32))
    monkeypatch.setattr(Job, "programs", [dict.fromkeys(("auto", "plain"), lambda *_: rollout)])
    job: Any = Job(None, slots=2, budget=4, draft_lengths=(0,))  # pyright: ignore[reportArgumentType]
    assert measure(job, Params({}, {}), steps=1, repeats=2) == DraftCell({0: [pytest.approx(1.0)]}, [0], [1.0])
