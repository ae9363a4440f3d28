"""What the benchmark times against each other is the same law."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from benchmarks.cut_laws import LAWS, by_sorting
from specjax.sampling import SamplingLaw, process_logits


def held(law: SamplingLaw, cut: Callable[..., jax.Array]) -> int:
    """Bytes beside the logits and what is made of them."""
    program = jax.jit(lambda x: cut(x, law)).lower(jax.ShapeDtypeStruct((32, 4096), np.float32)).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("law", [law for law in LAWS if law.top_p < 1], ids=str)
def test_bisection_holds_an_array_less_at_least(law: SamplingLaw):
    assert held(law, by_sorting) - held(law, process_logits) >= 4 * 32 * 4096


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_sorting_and_bisection_cut_alike(law: SamplingLaw):
    logits = 3 * jax.random.normal(jax.random.key(1), (50, 60))
    np.testing.assert_allclose(by_sorting(logits, law), process_logits(logits, law), atol=1e-5)
