"""Phases, the queue and chosen draft lengths do not change the result of a rollout."""

from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.rollout.plan import ChosenConfig, Phase, RolloutConfig, choose_lengths, lay_out
from specjax.rollout.rounds import Decoding, rounds
from specjax.rollout.speculative import speculative_rollout, start_rollout
from specjax.sampling import SamplingLaw
from specjax.train.batch import join_completions
from specjax.types import PolicyOutput, Rollout
from tests.refusals import refuses
from tests.tiny import WANDERING as WORLD
from tests.tiny import assert_same

GROUP, BUDGET, RUN = 4, 12, seed_step(3, 5)
SEQUENCES = GROUP * len(WORLD.prompts)
LONGEST = WORLD.batch.tokens.shape[1] + BUDGET


BASE = RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, law=SamplingLaw(0.8), stop_tokens=WORLD.stops)


def config(verifier: str = "coupled", **options: Any) -> RolloutConfig:
    return replace(BASE, verifier=verifier, **options)


# Plans with fewer slots than sequences, a shrinking batch, growing windows, and all of these.
PLANS = {
    "queue": dict(phases=((8, LONGEST),)),
    "queue of part groups": dict(phases=((5, LONGEST),), admit=3, kept_prompts=2),
    "queue one by one": dict(phases=((7, LONGEST),), admit=1),
    "shrinking": dict(phases=((SEQUENCES, LONGEST), (16, LONGEST), (12, LONGEST))),
    "growing": dict(phases=((SEQUENCES, 6), (SEQUENCES, 9))),
    "all": dict(phases=((9, 8), (4, LONGEST)), admit=2),
    "down to one": dict(phases=((9, 8), (1, LONGEST))),
}


@pytest.fixture(scope="module")
def plain() -> Rollout:
    return WORLD.rollout("none", "none", config(draft_length=0), RUN)


@pytest.fixture(scope="module")
def drafted() -> Rollout:
    return WORLD.rollout("eagle3", "random", config("rejection", draft_length=3), RUN)


def slow_except(*plans: str) -> list[Any]:
    """Return all plans as test parameters. Those not in `plans` are slow."""
    return [pytest.param(plan, marks=() if plan in plans else pytest.mark.slow) for plan in PLANS]


@pytest.mark.parametrize("plan", slow_except("shrinking", "queue"))
def test_autoregressive_tokens_do_not_depend_on_the_plan(plain: Rollout, plan: str):
    """Each phase gains its own rounds. Rows are decoded in the slots that the phase has, so a queue takes more."""
    rollout = WORLD.rollout("none", "none", config(draft_length=0, **PLANS[plan]), RUN)
    assert_same(rollout, plain, "row_rounds", "writer")
    np.testing.assert_array_equal(rollout.plain_rounds, rollout.loop_rounds)
    trips, rounds = np.asarray(rollout.loop_rounds)[0], np.asarray(rollout.row_rounds)
    if plan == "queue":
        assert len(trips) == 1 and rounds.sum() <= 8 * trips.sum() < 1.6 * rounds.sum()
    elif plan == "shrinking":
        assert (trips > 0).all() and trips.sum() == rounds.max()


@pytest.mark.parametrize("plan", slow_except("queue of part groups", "down to one"))
def test_drafted_tokens_do_not_depend_on_the_plan(drafted: Rollout, plan: str):
    """Under `rejection`, tokens depend on the drafts, so this also tests every row of the draft's cache.

    A queue gains the rounds of its mean active row, without the first token, which comes from the prefill. No gain is
    counted in two phases: a phase ends by one of the fastest rows, and the batch waits for the others in a later phase.
    """
    rollout = WORLD.rollout("eagle3", "random", config("rejection", draft_length=3, **PLANS[plan]), RUN)
    assert_same(rollout, drafted, "row_rounds", "drafted", "accepted", "writer")
    gained, trips = np.asarray(rollout.plain_rounds), np.asarray(rollout.loop_rounds)
    if plan == "queue of part groups":
        alpha = np.sum(np.asarray(rollout.lengths) - 1) / np.sum(np.asarray(rollout.row_rounds))
        np.testing.assert_array_equal(gained, np.rint(alpha * trips))
        assert alpha > 1.1
    elif plan in ("shrinking", "growing"):
        assert trips.sum() < gained.sum() <= np.max(rollout.lengths) - 1
        assert (gained[trips > 0] > 0).all() and (trips > 0).sum() > 1


@pytest.mark.parametrize("plan", [pytest.param("shrinking", marks=pytest.mark.slow), "all"])
def test_coupled_tokens_do_not_depend_on_chosen_lengths(plain: Rollout, plan: str):
    """One program serves all choices. In some, drafting starts, stops and starts again. One index leaves its loop."""
    options = config(draft_lengths=(0, 2), **PLANS[plan])
    phases = len(lay_out(options, SEQUENCES, WORLD.batch.tokens.shape[1]))
    program = WORLD.program("eagle3", options)
    trips = set()
    for pattern in ([0], [1], [0, 1], [1, 0]):
        rollout = program(WORLD.params("random"), WORLD.batch, RUN, jnp.array((pattern * phases)[:phases]))
        assert_same(rollout, plain)
        assert (np.asarray(rollout.drafted).sum() > 0) == (max(pattern) > 0)
        trips.add(int(np.sum(rollout.loop_rounds)))
    assert program._cache_size() == 1 and len(trips) > 1
    undrafted = program(WORLD.params("random"), WORLD.batch, RUN, jnp.zeros(phases, jnp.int32))
    fixed = choose_lengths(options, 0)
    chex.assert_trees_all_equal(WORLD.rollout("eagle3", "random", fixed, RUN), undrafted)
    arguments = WORLD.params("random"), WORLD.batch, RUN
    loops = [
        str(jax.make_jaxpr(program)(*arguments, jnp.zeros(phases, jnp.int32))).count(" while["),
        str(jax.make_jaxpr(WORLD.program("eagle3", fixed))(*arguments)).count(" while["),
    ]
    assert loops[0] - loops[1] == phases


@pytest.mark.slow
def test_drafting_that_starts_late_is_accepted_too():
    """Acceptance is comparable, although the draft has not read the earlier tokens."""
    options = config(draft_lengths=(0, 3), phases=((SEQUENCES, 8), (SEQUENCES, LONGEST)))
    rollout = WORLD.choosing("eagle3", options)(WORLD.params("trained"), WORLD.batch, RUN, jnp.array([0, 1]))
    whole = WORLD.rollout("eagle3", "trained", config(draft_length=3), RUN)
    rates = [np.asarray(x.accepted)[:, 0].sum() / np.asarray(x.drafted)[:, 0].sum() for x in (rollout, whole)]
    assert rates[0] > 0.5 * rates[1] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("drafter, draft", [("eagle3", "random"), ("model", "stranger")])
def test_drafts_after_a_gap_do_not_count_for_the_alarm(drafter: str, draft: str):
    """Drafts count only if the draft has read all earlier tokens, as in training."""
    options = config("rejection", draft_lengths=(0, 2), phases=((SEQUENCES, 6), (SEQUENCES, 9), (SEQUENCES, LONGEST)))
    program = WORLD.program(drafter, options)
    for chosen, early, late in (([1, 1, 0], True, False), ([0, 1, 1], False, True), ([1, 0, 1], True, True)):
        rollout = program(WORLD.params(draft), WORLD.batch, RUN, jnp.array(chosen))
        drafted, accepted = (np.asarray(x)[:, 0] for x in (rollout.drafted, rollout.accepted))
        outcome = np.asarray(rollout.draft_outcome)
        counted, kept = (outcome > 0).sum(axis=1), (outcome == 2).sum(axis=1)
        assert (counted > 0).any() == early and (counted < drafted).any() == late
        assert (counted <= drafted).all() and (kept <= accepted).all()
        np.testing.assert_array_equal(kept[counted == drafted], accepted[counted == drafted])
        batch = join_completions(WORLD.batch, rollout, jnp.zeros(SEQUENCES))
        np.testing.assert_array_equal(np.asarray(batch.accepted).sum(axis=1), kept)


@pytest.mark.parametrize("plan", ["queue of part groups", "queue one by one"])
def test_a_prompt_is_prefilled_once_for_all_its_samples(plan: str):
    """This holds too for a prompt with some samples that start at once and others that wait."""
    seen: list[int] = []

    def apply(
        params: Any, tokens: jax.Array, start: jax.Array, cache: Any = None, logits_at: Any = None
    ) -> PolicyOutput:
        if logits_at is not None:
            jax.debug.callback(lambda: seen.append(len(tokens)))
        return WORLD.policy.apply(params, tokens, start, cache, logits_at)

    options, policy = config(draft_length=0, **PLANS[plan]), replace(WORLD.policy, apply=apply)
    decode = jax.jit(lambda: speculative_rollout(policy, NoDrafter(), WORLD.params("none"), WORLD.batch, RUN, options))
    jax.block_until_ready(decode())
    jax.effects_barrier()
    assert len(seen) > 1 and sum(seen) == len(WORLD.prompts)


@pytest.mark.parametrize("plan, name", [("queue", "admit"), ("shrinking", "shrink")])
def test_a_profile_shows_what_happens_between_the_rounds(plan: str, name: str):
    program: Any = WORLD.program("none", config(draft_length=0, **PLANS[plan]))
    assert f"/{name}/" in program.lower(WORLD.params("none"), WORLD.batch, RUN).as_text(debug_info=True)


def test_a_drafting_batch_gains_the_rounds_of_its_longest_row(drafted: Rollout):
    np.testing.assert_array_equal(drafted.plain_rounds, [[np.max(drafted.lengths) - 1]])
    assert (np.asarray(drafted.plain_rounds) > np.asarray(drafted.loop_rounds)).all()


def test_phases_are_laid_out():
    assert lay_out(config(), 24, 5) == (Phase(24, 17),)
    assert lay_out(config(phases=((100, 100), (8, 9), (8, 100), (2, 4))), 24, 5) == (
        Phase(24, 17),
        Phase(8, 9),
        Phase(8, 17),
        Phase(2, 17),
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_choice_of_the_wrong_length_is_refused(count: int):
    """Otherwise a missing index would be replaced by its neighbour, and an additional one ignored."""
    options = config(draft_lengths=(0, 3), phases=((SEQUENCES, LONGEST), (16, LONGEST)))
    given = WORLD.params("none"), WORLD.batch, RUN
    with refuses(f"chosen: ...({count},)...(2,)"):
        WORLD.program("none", options)(*given, jnp.zeros(count, jnp.int32))
    with refuses("draft_lengths = (0, 3): ...phase 0"):
        WORLD.program("none", options)(*given)


class Untouched(NoDrafter):
    """Drafter that raises on every call of a round."""

    def refuse(self, *args: Any) -> Any:
        raise AssertionError("called")

    catch_up = propose = observe = refuse


@dataclass(frozen=True)
class ForkConfig(RolloutConfig):
    budget: int = 5

    def doubled(self) -> int:
        return 2 * self.budget


def test_a_subclass_of_the_options_keeps_what_it_adds_when_lengths_are_chosen():
    chosen = choose_lengths(ForkConfig(draft_lengths=(0, 3), budget=7), jnp.array([1]))
    assert isinstance(chosen, ForkConfig) and isinstance(chosen, ChosenConfig)
    assert (chosen.doubled(), chosen.length_index(0)) == (14, 1)
    assert replace(chosen, draft_length=1).budget == 7
    assert choose_lengths(chosen, jnp.array([0])).length_index(0) == 0


def test_rounds_at_draft_length_0_call_no_drafter():
    """So the traced program contains no drafting."""
    options = choose_lengths(config(draft_lengths=(0, 3)), jnp.array([0]))

    def run(drafter: Any) -> Decoding:
        return Decoding(WORLD.policy, drafter, WORLD.params("none"), options)

    state = jax.eval_shape(lambda: start_rollout(run(NoDrafter()), WORLD.batch, RUN, SEQUENCES).state)
    after, _ = jax.eval_shape(
        lambda state: rounds(run(Untouched()), state, 0, lambda state, _: state.done.all()), state
    )
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(AssertionError, match="called"):
        jax.eval_shape(lambda state: rounds(run(Untouched()), state, 3, lambda state, _: state.done.all()), state)
