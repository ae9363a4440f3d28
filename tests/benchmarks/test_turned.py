"""What is timed against each other differs in the second layout alone."""

import jax
import numpy as np
import pytest

from benchmarks.turned import without
from launch.bench.networks import random_networks
from launch.bench.presets import PRESETS
from models import projection
from specjax.types import PyTree


def named(tree: PyTree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_without_it_every_kernel_is_laid_out_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "TURNED_SIZE", 1)
    networks = random_networks(PRESETS["tiny"])
    twice, once = networks.params, without(networks).params
    for part in ("policy", "draft"):
        more, fewer = named(getattr(twice, part)), named(getattr(once, part))
        again = more.keys() - fewer.keys()
        assert again and all(name.endswith("['turned']") for name in again) and fewer.keys() < more.keys()
        for name in fewer:
            np.testing.assert_array_equal(fewer[name], more[name])
