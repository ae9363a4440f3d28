"""Findings of launch.diagnose for given measurements, of noise and of faults."""

import numpy as np

from launch.data.responses import Answers
from launch.diagnosis.acceptance import Rate, acceptance_findings, rates
from launch.diagnosis.findings import Finding, alternative_findings, coverage_finding
from launch.diagnosis.observed import Drafted, Observed


def test_another_way_to_read_is_reported_only_if_significant_and_useful():
    rng = np.random.default_rng(0)
    own, counted = rng.uniform(0.5, 0.8, size=(50, 20)), np.ones((50, 20), bool)
    noise = rng.normal(0, 0.2, own.shape)
    noise -= noise.mean()

    def state(*others: np.ndarray, own: np.ndarray = own) -> str:
        (finding,) = alternative_findings(own, [("rope", f"base {i}", x) for i, x in enumerate(others)], counted)
        assert (finding.state == "off") == bool(finding.do)
        return finding.state

    assert state(own - 0.1) == "ok"
    assert state(own + 1e-3) == "ok"
    assert state(own + noise + 0.02) == "undecided"
    assert state(own + noise + 0.02, own + 0.1) == "off"
    assert state(own * 0.2 + 0.1, own=own * 0.2) == "undecided"
    # Tokens of a row are dependent: many are no more evidence than one.
    assert state(own + np.repeat(rng.normal(0.04, 0.2, (50, 1)), 20, axis=1)) == "undecided"


def answers(*tokens: int) -> Answers:
    """Return one sequence whose first token is the prompt."""
    return Answers.pad([0], [([tokens[0]], list(tokens[1:]))], len(tokens))


def rate(predicted: float | None, accepted: int, count: int = 100, name: str = "position 1") -> Rate:
    drafted = Drafted(*(np.zeros(count, int) for _ in range(3)), np.arange(count) < accepted)
    overlaps = None if predicted is None else np.full((1, 1, 4), predicted)
    return rates(Observed(answers(0, 0, 0, 0), drafted), overlaps)[0][0]


def test_few_tokens_are_weak_evidence():
    assert not rate(0.98, 2, count=4).is_off
    assert rate(0.98, 10, count=20).is_off and rate(0.2, 16, count=20).is_off
    assert not rate(0.5, 45).is_off and not rate(0.98, 99).is_off
    # Significant, but small.
    assert not rate(0.5, 51_000, count=100_000).is_off


def test_one_cause_is_one_fault():
    right, wrong = rate(0.5, 50), rate(0.5, 10)

    def found(by_position: list[Rate], by_place: list[Rate]) -> list[str]:
        return [finding.state for finding in acceptance_findings(by_position, by_place)]

    assert found([right, right], [right, right]) == ["ok", "ok"]
    assert found([wrong, right], [wrong, wrong]) == ["off", "not checked"]
    assert found([wrong, right], [right, wrong]) == ["not checked", "off"]
    assert found([right, wrong], [right, right]) == ["off", "ok"]
    assert found([rate(None, 50)], [rate(None, 50)]) == ["not checked"]
    off, ok = Finding("caches", "off", "differ"), Finding("caches", "ok", "agree")
    explained = off.explained_by(off), off.explained_by(ok), ok.explained_by(off)
    assert [each.state for each in explained] == ["not checked", "off", "ok"]


def test_a_draft_vocabulary_that_lacks_tokens():
    """The completion is 5, 6, 7. Token 9 is in the prompt and does not count."""
    nothing = Drafted(*[np.zeros(0, int)] * 3, np.zeros(0, bool))
    observed = Observed(answers(9, 5, 6, 7), nothing)
    assert coverage_finding(np.array([5, 6, 7]), observed).state == "ok"
    assert coverage_finding(np.array([5, 9]), observed).state == "off"
