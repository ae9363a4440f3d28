"""Assertions that your drafter, verifier, policy or rollout function is lossless, and small fakes to try them on.

Each assertion returns what it measured and raises AssertionError with the evidence. Statistical tests state their
level, power and number of draws.
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
