from collections.abc import Callable

import jaxtyping
import pytest

from specjax import AdvantageConfig, DraftTrainingConfig, LossConfig, OptimizerConfig, RolloutConfig
from specjax.verify import VERIFIERS
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdvantageConfig(baseline="mean"), "baseline = mean: ...group...others...batch"),
        (lambda: AdvantageConfig(scale="std"), "scale = std: ...group...batch...none"),
        (lambda: LossConfig(ratio="seq"), "ratio = seq: ...token...sequence"),
        (lambda: LossConfig(surrogate="ppo"), "surrogate = ppo: ...clipped...cispo"),
        (lambda: LossConfig(aggregate="tokens"), "aggregate = tokens: ...token...sequence...budget"),
        (lambda: LossConfig(importance="seq"), "importance = seq: ...token...sequence...icepop"),
        (lambda: LossConfig(kl_estimator="k4"), "kl_estimator = k4: ...k1...k2...k3"),
        (lambda: LossConfig(kl_in="Reward", kl_coefficient=0.1), "kl_in = Reward: ...loss...reward...token"),
        (lambda: OptimizerConfig(kind="sgd"), "kind = sgd: ...adamw...muon"),
        (lambda: OptimizerConfig(schedule="step"), "schedule = step: ...constant...linear...cosine"),
        (lambda: DraftTrainingConfig(mode="offline"), "mode = offline: ...online...frozen"),
        (lambda: RolloutConfig(verifier="typical"), "verifier = typical: ...rejection...block...coupled"),
    ],
)
def test_an_unknown_choice_is_refused(make: Callable[[], object], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Types are checked only in tests, so turn the checks off.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with refuses(said):
        make()


def test_a_custom_verifier_is_accepted() -> None:
    assert RolloutConfig(verifier=VERIFIERS["block"]).verifier is VERIFIERS["block"]
