from collections.abc import Callable

import jaxtyping
import pytest

from specjax import AdvantageConfig, DraftTrainingConfig, LossConfig, OptimizerConfig, RolloutConfig
from specjax.verify import VERIFIERS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdvantageConfig(baseline="mean"), "baseline = mean: must be one of group, others, batch"),
        (lambda: AdvantageConfig(scale="std"), "scale = std: must be one of group, batch, none"),
        (lambda: LossConfig(ratio="seq"), "ratio = seq: must be one of token, sequence"),
        (lambda: LossConfig(surrogate="ppo"), "surrogate = ppo: must be one of clipped, cispo"),
        (lambda: LossConfig(aggregate="tokens"), "aggregate = tokens: must be one of token, sequence, budget"),
        (lambda: LossConfig(importance="seq"), "importance = seq: must be one of token, sequence, icepop"),
        (lambda: LossConfig(kl_estimator="k4"), "kl_estimator = k4: must be one of k1, k2, k3"),
        (lambda: LossConfig(kl_in="Reward", kl_coefficient=0.1), "kl_in = Reward: must be one of loss, reward, token"),
        (lambda: OptimizerConfig(kind="sgd"), "kind = sgd: must be one of adamw, muon"),
        (lambda: OptimizerConfig(schedule="step"), "schedule = step: must be one of constant, linear, cosine"),
        (lambda: DraftTrainingConfig(mode="offline"), "mode = offline: must be one of online, frozen"),
        (lambda: RolloutConfig(verifier="typical"), "verifier = typical: must be one of rejection, block, coupled"),
    ],
)
def test_a_word_that_is_no_choice_is_refused(
    make: Callable[[], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Outside of tests no one checks types.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == said


def test_a_verifier_of_ones_own_is_no_word() -> None:
    assert RolloutConfig(verifier=VERIFIERS["block"]).verifier is VERIFIERS["block"]
