"""Every fault that makes drafting differ between rollout and training raises the alarm, and nothing else does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.drafts.eagle3 import make_eagle3
from specjax.drafters import EitherDrafter, HeadDrafter, NGramDrafter
from specjax.keys import seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.train.batch import ScoredSequences, TrainBatch, join_completions
from specjax.train.draft.alarm import ALARM_PATIENCE
from specjax.train.draft.anchors import with_keys
from specjax.train.draft.loss import DraftSums
from specjax.train.draft.schedule import DraftTrainingConfig, init_draft_training, update_schedule
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import Params, Rollout, TrainState
from tests.tiny import World, distilled

# Few tokens, and distributions that the head can learn from the context.
WORLD = World(
    vocab=8,
    layers=1,
    hidden=12,
    seed=0,
    scale=2.0,
    prompts=((4, 1), (2, 1, 5), (1, 2), (0, 3), (6, 3), (5, 0, 1)),
    stops=(),
)
GROUP = 32
CONFIG = DraftTrainingConfig()
HEALTHY = replace(WORLD.drafters["eagle3"], unroll=1)
LAW = SamplingLaw(temperature=0.5)


@dataclass(frozen=True)
class PairedOneOff(HeadDrafter):
    """Drafter that pairs each feature with the token at the same position instead of the next one."""

    def observe(self, state, features, tokens, emitted):
        early = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
        return super().observe(state, features, early, emitted)


def other_layers(output):
    """Return the features one layer too late: the output of a layer instead of its input."""
    return output.hidden


# Text of a small vocabulary repeats itself often, so the lookup proposes in half of the rounds.
BESIDE = NGramDrafter(WORLD.vocab, min_n=1, max_n=3)

SHUFFLED = replace(HEALTHY, target_ids=np.roll(np.arange(WORLD.vocab, dtype=np.int32), 1))

FAULTS = {
    "none": HEALTHY,
    "none beside a lookup": EitherDrafter(BESIDE, HEALTHY),
    "feature layers": replace(HEALTHY, head=replace(HEALTHY.head, features=other_layers)),
    "rope base": make_eagle3(replace(WORLD._eagle3(WORLD.vocab), rope_theta=2.0), WORLD.policy),
    "paired one off": PairedOneOff(**vars(HEALTHY)),
    "shuffled d2t": SHUFFLED,
    "shuffled d2t beside a lookup": EitherDrafter(BESIDE, SHUFFLED),
}


@cache
def decode(fault: str, verifier: str) -> Callable[..., Rollout]:
    config = RolloutConfig(
        group_size=GROUP, max_new_tokens=12, draft_length=1, stop_tokens=WORLD.stops, verifier=verifier, law=LAW
    )
    return jax.jit(
        lambda params, prompts, run: speculative_rollout(WORLD.policy, FAULTS[fault], params, prompts, run, config)
    )


@cache
def measure(verifier: str, anchors: int = 0) -> Callable[[Params, ScoredSequences], DraftSums]:
    context = LossContext(WORLD.policy, HEALTHY, LAW, verifier=verifier, train_draft=False, anchors=anchors)

    def run(params: Params, sequences: ScoredSequences) -> DraftSums:
        batch = TrainBatch(**vars(sequences), advantage=jnp.zeros(sequences.tokens.shape))
        return accumulate(context, params, with_keys(batch, seed_step(5, 0), 0))[1].draft

    return jax.jit(run)


@jax.jit
def sequences_of(rollout: Rollout) -> ScoredSequences:
    return join_completions(WORLD.batch, rollout, jnp.zeros(len(rollout.lengths)))


@cache
def weights(draft: str) -> Params:
    """Return parameters of a `random` head, or of one `trained` by 250 steps of Adam on the policy's tokens."""
    random = WORLD.params("random")
    if draft == "random":
        return random
    batch = sequences_of(decode("none", "rejection")(random, WORLD.batch, seed_step(5, -1)))

    @jax.jit
    def train(params: Params, batch: ScoredSequences) -> Params:
        output = WORLD.policy.apply(params.policy, batch.tokens, jnp.zeros(len(batch.tokens), jnp.int32))
        draft = distilled(HEALTHY, params, batch.tokens, output, batch.completion, LAW, steps=250)
        return replace(params, draft=draft)

    return train(random, batch)


def adaptations(
    fault: str, draft: str = "trained", verifier: str = "rejection", decoded: str | None = None, anchors: int = 0
) -> list[dict[str, float]]:
    """Return the adaptation after each of several steps that train a draft and decode with it, or with `decoded`."""
    state = TrainState(
        step=jnp.int32(0),
        params=weights(draft),
        optimizer=Params({}, {}),
        reference=None,
        adaptation=init_draft_training(CONFIG, None),
    )
    schedule, seen = jax.jit(partial(update_schedule, CONFIG, due=False)), []
    for step in range(ALARM_PATIENCE):
        rollout = decode(fault, verifier)(weights(decoded or draft), WORLD.batch, seed_step(5, step))
        batch = sequences_of(rollout)
        sums = measure(verifier, anchors)(state.params, batch)
        state, metrics = schedule(state, batch, sums)
        drafted, taken = (float(np.sum(np.asarray(rollout.draft_outcome) >= least)) for least in (1, 2))
        rate = float(metrics["draft/measured_acceptance"])
        if anchors:
            assert 0.2 * drafted < sums.drafted < 0.8 * drafted
        else:
            np.testing.assert_allclose(rate, taken / drafted, rtol=1e-6)
        counts = dict(drafted=drafted, rate=rate, of_all=drafted / float(np.sum(rollout.drafted)))
        seen.append({name: float(x) for name, x in metrics.items()} | counts)
    return seen


@pytest.mark.parametrize(
    "drafter, draft",
    [
        ("none", "trained"),
        pytest.param("none", "random", marks=pytest.mark.slow),
        pytest.param("none beside a lookup", "random", marks=pytest.mark.slow),
    ],
)
def test_rejection_accepts_as_often_as_training_predicts(drafter: str, draft: str) -> None:
    """Only the head's own drafts count, not those of a lookup beside it."""
    seen = adaptations(drafter, draft)
    assert all(0.2 < step["of_all"] < 0.8 if "lookup" in drafter else step["of_all"] == 1 for step in seen)
    drafted = sum(step["drafted"] for step in seen)
    gap = sum((step["draft/promised_acceptance"] - step["rate"]) * step["drafted"] for step in seen) / drafted
    assert drafted > 1000
    # The variance of a sum of independent events is largest if all have the same probability.
    mean = np.mean([step["draft/promised_acceptance"] for step in seen])
    assert abs(gap) < 4 * np.sqrt(mean * (1 - mean) / drafted)
    assert not any(step["draft/alarm"] for step in seen)


def test_coupled_acceptance_lies_within_the_predicted_bounds() -> None:
    seen = adaptations("none", verifier="coupled")
    assert not any(step["draft/alarm"] for step in seen)
    for step in seen:
        least = step["draft/promised_acceptance"]
        assert least - 0.05 < step["rate"] < 2 * least / (1 + least) + 0.05


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.startswith("none")])
def test_a_planted_fault_raises_the_alarm(fault: str) -> None:
    seen = adaptations(fault)
    assert [step["draft/alarm"] for step in seen] == [0] * (ALARM_PATIENCE - 1) + [1]


@pytest.mark.parametrize("anchors", [0, 4])
def test_stale_weights_raise_the_alarm(anchors: int) -> None:
    assert adaptations("none", decoded="random", anchors=anchors)[-1]["draft/alarm"] == 1


def test_anchors_predict_the_acceptance_of_all_tokens() -> None:
    (every, *_), (drawn, *_) = (adaptations("none", anchors=anchors) for anchors in (0, 4))
    assert abs(drawn["draft/promised_acceptance"] - every["draft/promised_acceptance"]) < 0.1
    assert abs(drawn["draft/measured_acceptance"] - every["draft/measured_acceptance"]) < 0.1
    assert drawn["draft/alarm"] == 0
