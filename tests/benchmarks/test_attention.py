"""The implementations that are timed against each other give the same answers."""

import numpy as np
import pytest

from benchmarks.attention import Cell, Shape, candidates

SHAPE = Shape(4, 2, 8, "float32", (), ())


@pytest.mark.parametrize("queries", [1, 3])
def test_every_implementation_attends_alike(queries: int):
    cells = [Cell(name, attend, SHAPE, 2, 5, queries, 2) for name, attend in candidates(queries).items()]
    assert len(cells) > 1
    for cell in cells:
        np.testing.assert_allclose(cell.once, cells[0].once, atol=1e-5)
        assert 0 < cell.measure() < 10
