"""Rollouts on a mesh of their own, against the same stages on one mesh."""

import gc
import math
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from specjax.asynchronous.program_timer import ProgramTimer
from specjax.asynchronous.step import AsynchronousStep, MixedVersions, Sent, _generate
from specjax.asynchronous.weight_transfer import Send
from specjax.parallel import processes
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import MeshConfig, disjoint_mesh
from specjax.rewards import HostReward
from specjax.train.config import TrainConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.train_step import TrainStep
from specjax.train.updates import UpdateConfig
from specjax.types import Ending, Params, Prompts, Rollout, TrainState
from tests.compiled import compilations, compiled_late
from tests.specjax.sums import Sums
from tests.specjax.test_adapters import adapted_params
from tests.specjax.test_split_step import count_fives
from tests.specjax.training import (
    CONFIG,
    DECODER,
    VOCAB,
    host_copy,
    make_prompts,
    mesh_of,
    networks,
    params_on,
    state_on,
)

POLICY, DRAFTER = networks()
# Any difference between rollout and training is above the threshold of the alarm.
COUPLED = replace(CONFIG, rollout=replace(CONFIG.rollout, verifier="coupled"), gap_alarm=1e-12)


def stages_on(*shape: int, config: TrainConfig = COUPLED) -> Stages:
    return Stages(POLICY, DRAFTER, HostReward(count_fives), config, mesh_of(*shape))


def batches(count: int) -> list[Prompts]:
    """Batches that differ."""
    prompts = make_prompts()
    return [replace(prompts, id=prompts.id + 100 * number) for number in range(count)]


class Both:
    """The same steps on one mesh and on two, each program compiled once."""

    def __init__(
        self, config: TrainConfig, shape: tuple[int, ...], rollout_shape: tuple[int, ...], lora: bool = False
    ) -> None:
        self.stages = stages_on(*shape, config=config)
        self._params_on = partial(adapted_params, b_scale=0.3) if lora else params_on
        self.step = TrainStep(self.stages)
        rollout_mesh = disjoint_mesh(MeshConfig(*rollout_shape), self.stages.mesh)
        self.asynchronous = AsynchronousStep(self.stages, rollout_mesh)

    def start(self) -> TrainState:
        return init_train_state(self._params_on(self.stages.mesh), self.stages.config, self.stages.mesh)

    def by_hand(self, lag: int, steps: int) -> tuple[Params, list[np.ndarray]]:
        """Every rollout by a copy of the networks from `lag` updates before."""
        state, tokens = self.start(), []
        copies = [host_copy(state.params)] * (lag + 1)
        for prompts in batches(steps):
            earlier = jax.device_put(copies[-1 - lag], jax.tree.map(lambda x: x.sharding, state.params))
            rollout = self.step.generate(replace(state, params=earlier), prompts)
            tokens.append(np.asarray(rollout.tokens))
            state, _, _ = self.step.update(state, prompts, rollout, self.stages.reward(rollout, prompts))
            copies.append(host_copy(state.params))
        return copies[-1], tokens

    def ahead(self, lag: int, steps: int) -> tuple[Params, list[np.ndarray]]:
        state, tokens, prompts = self.start(), [], batches(steps + lag)
        for batch in prompts[:lag]:
            state = self.asynchronous.begin(state, batch)
        self.asynchronous.start_compiling(state, prompts[lag])
        for number, batch in enumerate(prompts[lag:]):
            with compilations() as heard:
                state, rollout, metrics = self.asynchronous(state, batch)
            assert not {"_generate", "update"} & compiled_late(heard)
            tokens.append(np.asarray(rollout.tokens))
            assert int(metrics["asynchronous/lag"]) == min(lag, number) and metrics["asynchronous/waiting"] == lag
            assert metrics["time/rollout_mesh_busy"] > 0 and metrics["time/reward"] > 0
            assert self.asynchronous.updated.result().busy_s > 0
            # Networks of several updates are compared by neither alarm.
            assert int(metrics["rollout/logprob_alarm"]) == (not lag) and ("draft/alarm" in metrics) == (not lag)
            idle = metrics["time/rollout_mesh_idle"], metrics["time/training_mesh_idle"]
            assert np.all(np.greater_equal(idle, 0)) or number == 0
        return host_copy(state.params), tokens


@pytest.fixture(scope="module")
def single() -> Both:
    return Both(COUPLED, (1, 1, 1), (1, 1, 1))


@pytest.fixture(scope="module")
def adapted() -> Both:
    return Both(COUPLED, (1, 1, 1), (1, 1, 1), lora=True)


@pytest.mark.parametrize(
    "both, lag",
    [
        *(("single", lag) for lag in (0, 1, 2)),
        *(pytest.param("adapted", lag, marks=pytest.mark.slow) for lag in (0, 1)),
    ],
)
def test_rollouts_are_those_of_the_networks_some_updates_before(
    both: str, lag: int, request: pytest.FixtureRequest
) -> None:
    """Without lag they are the synchronous step's. With one, XLA rounds an update without alarms differently."""
    of: Both = request.getfixturevalue(both)
    (wanted, tokens), (found, others) = of.by_hand(lag, 3), of.ahead(lag, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5 * lag, atol=1e-6 * lag), found, wanted)


def test_the_base_of_adapters_is_sent_once_and_held_once(adapted: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout is sent no array of the policy as large as a kernel. A new process sends the base again."""
    sent, plain = list[list[jax.ShapeDtypeStruct]](), Send.__call__

    def record(send: Send, state: Any) -> Any:
        made = plain(send, state)
        policy = made.params.policy if isinstance(made, Sent) else made
        sent.append([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(policy)])
        return made

    monkeypatch.setattr(Send, "__call__", record)
    mesh = disjoint_mesh(MeshConfig(), adapted.stages.mesh)
    step, state, held = AsynchronousStep(adapted.stages, mesh), adapted.start(), count_on(mesh)
    for batch in batches(3):
        state = step.begin(state, batch)
    (base, *rollouts), params = sent, state.params
    assert bytes_per_device(base) == bytes_per_device(params.base)
    assert [bytes_per_device(each) for each in rollouts] == [bytes_per_device(params.policy)] * 3
    assert max(math.prod(x.shape) for each in rollouts for x in each) < math.prod(UP)
    # Three rollouts wait for their updates.
    jax.block_until_ready(state)
    assert count_on(mesh) - held == sum(x.shape == UP for x in base)


def test_an_environment_that_ends_all_at_once_leaves_the_rollouts_ahead_as_they_are(single: Both) -> None:
    """Each rollout ahead has the bits of one turn, under the noise of its own step."""
    rollout = replace(COUPLED.rollout, environment=Sums(VOCAB, ends=True))
    stages = replace(single.stages, config=replace(COUPLED, rollout=rollout))
    step = AsynchronousStep(stages, single.asynchronous._mesh)
    found, wanted = single.start(), single.start()
    for prompts in batches(2):
        found, wanted = step.begin(found, prompts), single.asynchronous.begin(wanted, prompts)
    for ahead, plain in zip(found.ahead, wanted.ahead, strict=True):
        for name in ("tokens", "lengths", "law", "full", "writer", "accepted", "row_rounds"):
            of_both = getattr(ahead.rollout, name), getattr(plain.rollout, name)
            np.testing.assert_array_equal(*of_both, err_msg=name)
        turns, ending = jax.device_get((ahead.rollout.turns, ahead.rollout.ending))
        # A row that the budget cuts has ended no turn.
        np.testing.assert_array_equal(turns, ending == Ending.STOP)
        assert set(turns.tolist()) == {0, 1} and jnp.any(ahead.rollout.returns > 0)


UP = DECODER.hidden_size, DECODER.intermediate_size


def count_on(mesh: Mesh) -> int:
    """Return how many arrays of the size of an MLP's kernel the devices of a mesh hold."""
    gc.collect()
    return sum(x.shape == UP and x.devices() == set(mesh.devices.flat) for x in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, rollout_shape, lora",
    [
        ((2, 2, 1), (2, 1, 1), True),
        ((2, 2, 1), (2, 1, 2), False),
        ((2, 2, 1), (1, 1, 1), False),
        ((1, 1, 1), (2, 2, 1), False),
        ((1, 2, 1), (4, 1, 1), False),
        ((1, 1, 2), (2, 1, 1), True),
    ],
)
def test_networks_move_between_meshes_of_other_shapes(
    shape: tuple[int, ...], rollout_shape: tuple[int, ...], lora: bool
) -> None:
    both = Both(COUPLED, shape, rollout_shape, lora)
    (wanted, tokens), (found, others) = both.by_hand(1, 3), both.ahead(1, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)


LONG = {
    "update": replace(COUPLED, updates=UpdateConfig(epochs=40, recompute_old=True)),
    "rollout": replace(
        COUPLED,
        rollout=replace(COUPLED.rollout, max_new_tokens=200, stop_tokens=(), draft_length=1),
        selection=SelectionConfig(groups=1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_rollout_and_the_update_before_its_own_go_on_together(name: str) -> None:
    """An order of events, not of times: of the two that are under way, the short one is ready first, whichever it is.

    If one waited for the other, it could not be ready first in the arm in which it is the long one.
    """
    long = LONG[name]
    stages = stages_on(1, 1, 1, config=long)
    step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh))
    prompts = batches(4)
    state = step.begin(state_on(stages.mesh, long), prompts[0])
    for batch in prompts[1:]:
        state, _, metrics = step(state, batch)
        rollout, update = state.ahead[0].rollout.lengths, metrics["loss/policy"]
        short, longer = (rollout, update) if name == "update" else (update, rollout)
        jax.block_until_ready(short)
        overlapped = not longer.is_ready()
    # The steps before compiled.
    assert overlapped


def test_a_draft_that_was_sent_at_another_update_ends_the_run(single: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sent = batches(3), list[Sent]()

    def send_late(send: Send, state: TrainState) -> Sent:
        sent.append(plain(send, state))
        late = sent[max(len(sent) - 2, 0)]
        mixed = (Params(new.policy, old.draft) for new, old in zip(sent[-1][::2], late[::2], strict=True))
        return Sent(next(mixed), sent[-1].chosen, next(mixed))

    plain = Send.__call__
    monkeypatch.setattr(Send, "__call__", send_late)
    state, _, _ = single.asynchronous(state_on(single.stages.mesh, COUPLED), prompts[0])
    with pytest.raises(MixedVersions, match="policy after update 1 and the draft after update 0"):
        single.asynchronous(state, prompts[1])


def test_within_a_process_the_host_gets_no_more_of_a_rollout_than_it_scores(
    single: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, plain = list[object](), jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: (fetched.extend(jax.tree.leaves(tree)), plain(tree))[1])
    _, rollout, _ = single.asynchronous(state_on(single.stages.mesh, COUPLED), make_prompts())
    # Tokens, their lengths, the prompts' ids, and two versions.
    assert len([x for x in fetched if isinstance(x, jax.Array)]) == 5 < len(jax.tree.leaves(rollout))


@pytest.mark.parametrize("routing", ["recompute", "replay"])
def test_between_processes_the_experts_of_a_rollout_pass_only_to_be_replayed(
    single: Both, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(single.stages.config, loss=replace(single.stages.config.loss, routing=routing))
    step = AsynchronousStep(replace(single.stages, config=config), single.asynchronous._mesh)
    (waiting,) = single.asynchronous.begin(single.start(), make_prompts()).ahead
    routes = np.zeros((*waiting.rollout.tokens.shape, 1, 1), np.uint8)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "fetch", lambda tree: tree)
    rollout, _, _ = step._finished(replace(waiting, rollout=replace(waiting.rollout, routes=routes)))
    assert (rollout.routes is not None) == (routing == "replay") and rollout.tokens is waiting.rollout.tokens


def test_a_rollout_has_the_noise_and_the_draft_lengths_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rollouts wait before it: its noise is that of two steps later. It drafts as its networks' step chose."""
    given = list[Any]()

    def generate(stages: Stages, *args: Any) -> Rollout:
        given.extend(args)
        return Rollout(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))

    monkeypatch.setattr(Stages, "generate", generate)
    sent = Sent(Params({}, {}), jnp.array([1, 0]), Params(jnp.int32(5), jnp.int32(5)))
    _generate(stages_on(1, 1, 1), sent, make_prompts(), jnp.int32(2), None)
    _, _, step, chosen, carried, version = given
    assert (int(step), int(version), carried) == (7, 5, None) and chosen is sent.chosen


def test_what_cannot_be_is_refused() -> None:
    stages = stages_on(2, 1, 1)
    with pytest.raises(ValueError, match="rollout_mesh = .* shares devices"):
        AsynchronousStep(stages, mesh_of(1, 1, 1))
    with pytest.raises(ValueError, match="rollout_mesh = .*: needs 7 devices"):
        disjoint_mesh(MeshConfig(7), stages.mesh)
    with pytest.raises(ValueError, match="has 3 devices; must be a multiple or a divisor of 2"):
        AsynchronousStep(stages, disjoint_mesh(MeshConfig(3), stages.mesh))
    with pytest.raises(ValueError, match="has 2 times the devices of mesh; data x fsdp must be a multiple of 2"):
        AsynchronousStep(stages, disjoint_mesh(MeshConfig(1, 1, 1, 4), stages.mesh))


class Pending:
    """An array that is ready once it is told so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def is_ready(self) -> bool:
        return self.event.is_set()

    def block_until_ready(self) -> object:
        return self.event.wait()


def test_a_mesh_is_idle_from_the_end_of_a_program_until_the_next_has_what_it_needs() -> None:
    timer, first, needed, second = ProgramTimer(), Pending(), Pending(), Pending()
    spans = [timer.time(time.perf_counter(), None, first)]
    assert timer.idle_s() == 0
    first.event.set()
    before = spans[0].result()
    spans.append(timer.time(before.end, needed, second))
    time.sleep(0.05)
    needed.event.set()
    time.sleep(0.02)
    second.event.set()
    span = spans[1].result()
    assert np.isnan(before.idle_s) and span.idle_s >= 0.05 and span.busy_s >= 0
    assert np.isclose(span.end, before.end + span.idle_s + span.busy_s)
    # Of a program that has ended already, as where the call waits for it, the dispatch is what is known.
    late = timer.time(span.end, None, second).result()
    assert late.idle_s == 0 and timer.idle_s() > 0
