"""What the closing comparison compares."""

import numpy as np
import pytest

from launch.speedup import tail_of


@pytest.mark.parametrize(
    ("shards", "group_size", "prompts", "samples"),
    [(1, 1, [[1, 3, 5, 7], [8, 10, 12, 14]], 1), (1, 4, [[7], [14]], 4), (1, 3, [[5, 7], [12, 14]], 2)]
    + [(2, 4, [[3, 7], [10, 14]], 2), (2, 1, [[1, 3, 5, 7], [8, 10, 12, 14]], 1), (8, 2, [[*range(8)]] * 2, 1)],
)
def test_the_tail_is_four_sequences_of_the_longest_groups(
    shards: int, group_size: int, prompts: list[list[int]], samples: int
):
    turns = np.arange(16).reshape(2, 8) if shards < 8 else np.tile(np.arange(8), (2, 1))
    # Odd prompts are longer in the first turn, even ones in the second, and all rise; one sample does not decide.
    means = np.where(turns % 2 == (np.arange(2)[:, None] + 1) % 2, 100, 50) + turns
    lengths = np.repeat(means[..., None], group_size, axis=-1)
    lengths[..., 0] -= 1 if group_size == 1 else 30
    chosen, count = tail_of(turns, lengths.reshape(2, -1), shards, group_size)
    assert count == samples and np.sort(chosen, axis=1).tolist() == prompts
