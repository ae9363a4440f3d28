"""Comparisons of a policy with expected logits: in a full forward, and with a cache at ragged row lengths."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.decoder import make_policy
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Cache, PolicyOutput, PyTree

GOLDEN = Path(__file__).parents[1] / "golden"
FEATURE_LAYERS = (1, 2, 3)
DRAFT_LENGTH = 3

close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


def described(tensors: dict[Any, Any]) -> dict[Any, tuple]:
    """Return dtype, shape and bytes of each array, for comparison."""
    return {name: (x.dtype, x.shape, np.asarray(x).tobytes()) for name, x in tensors.items()}


@dataclass
class Case:
    """A policy with its expected outputs, and its forward, compiled once per shape."""

    config: DecoderConfig
    params: PyTree
    expected: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        self.policy = make_policy(self.config)
        self._apply = jax.jit(self.policy.apply)

    def apply(self, tokens: np.ndarray, start: np.ndarray, cache: Cache | None = None) -> PolicyOutput:
        return self._apply(self.params, jnp.asarray(tokens), jnp.asarray(start, jnp.int32), cache)


def load_case(directory: Path, expected: dict[str, np.ndarray]) -> Case:
    config = read_hf_config(directory, FEATURE_LAYERS)
    return Case(config, load_policy(directory, config, make_mesh(MeshConfig())), expected)


def check_full_forward(case: Case) -> None:
    tokens = case.expected["tokens"]
    output = case.apply(tokens, np.zeros(len(tokens)))
    for name in ("logits", "features", "hidden"):
        close(getattr(output, name), case.expected[name], err_msg=name)


def check_cached_decode(case: Case) -> None:
    """Prefill each row to its own length, then verify, roll back and decode."""
    tokens, logits = case.expected["tokens"], case.expected["logits"]
    rows, length = tokens.shape
    wrong = (tokens + 1) % case.config.vocab_size
    visible = np.array([length // 2 - 5, 1, length // 2 + 3])[:rows]
    cache = case.policy.init_cache(rows, length + 3)

    def run(tokens: np.ndarray, start: np.ndarray, width: int) -> np.ndarray:
        nonlocal cache
        columns = start[:, None] + np.arange(width)
        chunk = np.take_along_axis(tokens, columns, axis=1)
        output = case.apply(chunk, start, cache)
        cache = output.cache
        return np.asarray(output.logits)

    def check(start: np.ndarray, width: int) -> None:
        columns = start[:, None] + np.arange(width)
        close(run(tokens, start, width), np.take_along_axis(logits, columns[..., None], axis=1))

    # Prompts are padded to the longest, so a shorter row writes garbage after its length.
    padded = np.where(np.arange(length) < visible[:, None], tokens, wrong)
    prefill = run(padded, np.zeros(rows, np.int64), length - 4)
    for row, count in enumerate(visible):
        close(prefill[row, :count], logits[row, :count])
    for accepted in ([0, 3, 1], [2, 0, 3]):
        run(wrong, visible, DRAFT_LENGTH + 1)  # all rejected: the next write covers it
        check(visible, DRAFT_LENGTH + 1)
        visible = visible + 1 + np.array(accepted)[:rows]
        check(visible, 1)
        visible = visible + 1
