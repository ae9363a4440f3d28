"""Options out of range, and combinations of options that make no sense, are refused by name."""

from collections.abc import Callable

import jaxtyping
import pytest

from specjax import (
    AdvantageConfig,
    DraftTrainingConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingLaw,
    TrainConfig,
    UpdateConfig,
)
from specjax.verify import VERIFIERS
from tests.refusals import refuses

# Each of these is out of range by itself.
RANGES: dict[Callable[..., object], dict] = {
    DraftTrainingConfig: dict(every=0, max_every=0, fall=1.0),
    LossConfig: dict(
        clip_low=-0.1, clip_high=-1, kl_coefficient=-1, importance_cap=0.0, importance_floor=-1.0, dual_clip=1.0
    ),
    OptimizerConfig: dict(
        learning_rate=-1.0, weight_decay=-0.1, warmup_steps=-1, clip_norm=0.0, momentum=1.0, decay_steps=5, floor=0.5
    ),
    RolloutConfig: dict(phases=((0, 9),), draft_lengths=(3, 1), admit=-1),
    SamplingLaw: dict(temperature=-0.1, top_k=0, top_p=0.0, min_p=2.0),
    TrainConfig: dict(ladder=(2,), logit_chunk=-1),
    UpdateConfig: dict(epochs=0),
}
# Of each, the first option is refused, and the message says what is allowed.
REFUSED: list[tuple[Callable[..., object], dict, str]] = [
    *((make, {name: value}, "") for make, options in RANGES.items() for name, value in options.items()),
    *((TrainConfig, dict(ladder=ladder), "") for ladder in ((0, 8), (-4,), (8, 4), (8, 8))),
    (DraftTrainingConfig, dict(fall=-0.1), ""),
    (SamplingLaw, dict(top_p=1.1), ""),
    (AdvantageConfig, dict(baseline="mean"), "group...others...batch"),
    (AdvantageConfig, dict(scale="std"), "group...batch...none"),
    (AdvantageConfig, dict(scale="group", baseline="batch"), ""),
    (DraftTrainingConfig, dict(mode="offline"), "online...frozen"),
    (LossConfig, dict(ratio="seq"), "token...sequence"),
    (LossConfig, dict(surrogate="ppo"), "clipped...cispo"),
    (LossConfig, dict(aggregate="tokens"), "token...sequence...budget"),
    (LossConfig, dict(importance="seq"), "token...sequence...icepop"),
    (LossConfig, dict(importance_cap=None, importance="icepop"), ""),
    (LossConfig, dict(dual_clip=3.0, surrogate="cispo"), ""),
    (LossConfig, dict(kl_estimator="k4"), "k1...k2...k3"),
    (LossConfig, dict(kl_in="Reward", kl_coefficient=0.1), "loss...reward...token"),
    (OptimizerConfig, dict(kind="sgd"), "adamw...muon"),
    (OptimizerConfig, dict(schedule="step"), "constant...linear...cosine"),
    (OptimizerConfig, dict(decay_steps=0, schedule="linear"), ""),
    (OptimizerConfig, dict(floor=1.5, schedule="cosine", decay_steps=5), ""),
    (RolloutConfig, dict(verifier="typical"), "rejection...block...coupled"),
    (RolloutConfig, dict(phases=((4, 9), (8, 9))), "slots...window"),
    (RolloutConfig, dict(draft_lengths=(-1, 1)), ""),
]


@pytest.mark.parametrize(("make", "options", "allowed"), REFUSED, ids=str)
def test_an_option_is_refused(make: Callable, options: dict, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Types are checked only in tests, so turn the checks off.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    name, value = next(iter(options.items()))
    with refuses(f"{name} = {value}: " + (f"...{allowed}" if allowed else "")):
        make(**options)


@pytest.mark.parametrize("cut", [dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1), dict(temperature=0.0)], ids=str)
def test_training_under_a_truncated_law_needs_the_flag(cut: dict) -> None:
    law = SamplingLaw(**cut)
    assert law.truncates and not SamplingLaw(temperature=0.3).truncates
    with refuses("rollout.law = ...allow_truncated_law"):
        TrainConfig(rollout=RolloutConfig(law=law))
    assert TrainConfig(rollout=RolloutConfig(law=law), allow_truncated_law=True).rollout.law is law


def test_a_custom_verifier_is_accepted() -> None:
    assert RolloutConfig(verifier=VERIFIERS["block"]).verifier is VERIFIERS["block"]
