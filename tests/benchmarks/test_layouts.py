"""What is timed against each other differs in the added layouts alone."""

import jax
import numpy as np
import pytest

from benchmarks.layouts import without
from launch.bench.models import random_networks
from launch.bench.presets import PRESETS
from models import projection
from specjax.types import PyTree


def named(tree: PyTree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_without_them_every_kernel_is_laid_out_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "LAID_OUT_SIZE", 1)
    networks = random_networks(PRESETS["tiny"])
    laid_out, plain = networks.params, without(networks).params
    for part in ("policy", "draft"):
        more, fewer = named(getattr(laid_out, part)), named(getattr(plain, part))
        added = {path.split("'")[-2] for path in more.keys() - fewer.keys()}
        assert added == {"turned", "halves"} and fewer.keys() < more.keys()
        for name in fewer:
            np.testing.assert_array_equal(fewer[name], more[name])
