"""Proofs that a drafter, a verifier, a policy or a rollout function of one's own is lossless, and fakes to try them on.

Every assertion says what it tests, returns what it found and raises AssertionError with the evidence. Those that test
by chance state their level, power and number of draws.
"""

from specjax.testing.caches import CacheCheck, assert_cache_consistent
from specjax.testing.drafters import PolicyDrafter, TableDrafter
from specjax.testing.exact import Fit, completion_law, count_completions, fit, reference_law
from specjax.testing.lossless import assert_lossless
from specjax.testing.policy import tiny_policy
from specjax.testing.same import assert_same_rollout
from specjax.testing.verifiers import Enumeration, assert_verifier_lossless

__all__ = [
    "CacheCheck",
    "Enumeration",
    "Fit",
    "PolicyDrafter",
    "TableDrafter",
    "assert_cache_consistent",
    "assert_lossless",
    "assert_same_rollout",
    "assert_verifier_lossless",
    "completion_law",
    "count_completions",
    "fit",
    "reference_law",
    "tiny_policy",
]
