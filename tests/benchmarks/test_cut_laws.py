"""The implementations that the benchmark compares compute the same law."""

import jax
import numpy as np
import pytest

from benchmarks.cut_laws import LAWS, by_sorting
from specjax.sampling import SamplingLaw, process_logits


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_sorting_and_bisection_agree(law: SamplingLaw):
    logits = 3 * jax.random.normal(jax.random.key(1), (50, 60))
    np.testing.assert_allclose(by_sorting(logits, law), process_logits(logits, law), atol=1e-5)
