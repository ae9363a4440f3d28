"""Rollouts whose environment answers on the host, while the caches stay on the devices.

Four programs hand the state on and reuse its buffers. `begin` runs the prompts. `decode` runs rounds until a turn
ends. `answer` appends the answers that have come. `finish` returns the rollout. While some rows wait, others decode.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters import Drafter
from specjax.environments import Answer, HostEnvironment, Observation
from specjax.keys import SeedStep, environment_keys, seed_step
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES, shapes_on
from specjax.program import Program
from specjax.rollout.admission import Carry
from specjax.rollout.append import apply_answers
from specjax.rollout.conversations import Conversations, Rows
from specjax.rollout.generate import Choice, RolloutFn, abstract_prompts, make_prepare, on_shards, place, prepare
from specjax.rollout.phase import rounds_of_phase
from specjax.rollout.plan import RolloutConfig, admission, choose_lengths
from specjax.rollout.rounds import Decoding, RoundState
from specjax.rollout.speculative import finished_record, speculative_rollout, start_rollout
from specjax.types import Ending, Params, Policy, Prompts, Rollout, pytree

# Most rounds of a call of `decode`, so that an answer does not wait for a long turn of another row.
ROUNDS = 16
TurnsProgram = Literal["begin", "decode", "answer", "finish"]


@pytree
class Paused:
    """A rollout between two programs. rounds: int32 [shards], of each data shard so far."""

    state: RoundState
    record: Rollout
    rounds: Int[Array, "shards"]


class HostTurns:
    """Callable that generates as `GenerateProgram` does, with an environment on the host: see `make_generate`.

    Attributes:
        environment: answers; another of the same width may take its place.
        seconds: of the last rollout, by metric: `time/tools`, the host's own work between programs; `time/waiting`, no
                 row could decode before an answer came; `time/decoding`, the rest.
    """

    def __init__(self, policy: Policy, drafter: Drafter, config: RolloutConfig, mesh: Mesh) -> None:
        environment = config.environment
        assert isinstance(environment, HostEnvironment)
        if processes.count() > 1:
            raise ValueError("environment: answers on the host; the job must be one process")
        self.environment, self._networks, self._config, self.mesh = environment, (policy, drafter), config, mesh
        self._rows = NamedSharding(mesh, P(BATCH_AXES))
        self._prepare: Any = None
        self.seconds: dict[str, Any] = {}
        rows, whole = P(BATCH_AXES), P()
        programs: dict[TurnsProgram, Any] = {
            "begin": (self._begin, (whole, rows, whole, whole), ()),
            "decode": (self._decode, (whole, rows, whole), (1,)),
            "answer": (self._answer, (whole, rows, rows, rows), (1,)),
            "finish": (self._finish, (whole, rows, rows, whole), ()),
        }
        self._programs = {
            name: Program(
                on_shards(run, mesh, inputs),
                mesh,
                compute_dtype=policy.dtype,
                out_shardings=self._rows,
                donate_argnums=donated,
            )
            for name, (run, inputs, donated) in programs.items()
        }

    def __call__(self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice = None) -> Rollout:
        """Return the rollout. See `make_generate` for the arguments."""
        with jax.set_mesh(self.mesh):
            if self._prepare is None:
                self._prepare = make_prepare(*self._networks, params)
            return self.generate(self._prepare(params), prompts, seed_step, chosen)

    def generate(self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice = None) -> Rollout:
        """Return the rollout, given prepared parameters."""
        start, programs = time.perf_counter(), self._programs
        paused = programs["begin"](params, place(prompts, self.mesh), seed_step, chosen)
        with self._conversations(paused, prompts) as conversations:
            while not (rows := _rows(paused)).done.all():
                if answers := conversations.answers(rows):
                    seen = self._place(self._observation(answers, len(rows.done)))
                    paused = programs["answer"](params, paused, *seen)
                paused = programs["decode"](params, paused, chosen)
            last_rewards = conversations.last_rewards()
        rollout = programs["finish"](params, paused, self._place(last_rewards), chosen)
        host = conversations.seconds
        jax.block_until_ready(rollout)
        self.seconds = host | {"time/decoding": time.perf_counter() - start - sum(host.values())}
        return rollout

    def start_compiling(self, params: Params, prompts: Prompts) -> None:
        """Start to compile for such parameters and prompts, as `Program.start_compiling`; without `chosen`."""
        policy, drafter = self._networks
        prepared = shapes_on(NamedSharding(self.mesh, P()), jax.eval_shape(partial(prepare, policy, drafter), params))
        self.start_compiling_prepared(prepared, prompts, seed_step(0, 0), None)

    def start_compiling_prepared(
        self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice
    ) -> Rollout:
        """Start to compile for such parameters, prepared, and return the shapes of the rollout."""
        calls = self._calls(params, prompts, seed_step, chosen)
        *_, rollout = [self._programs[name].start_compiling(*args) for name, args in calls]
        return rollout

    def trace(
        self, name: TurnsProgram, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice
    ) -> jax.stages.Traced:
        """Return a traced program for such parameters, prepared: `answer` for the longest answers."""
        calls = dict(self._calls(params, prompts, seed_step, chosen))
        return self._programs[name].trace(*calls[name])

    def _calls(
        self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice
    ) -> list[tuple[TurnsProgram, tuple[Any, ...]]]:
        """Return the programs in order with the shapes of their arguments: `answer` for each width, ascending."""
        rows, begin = partial(shapes_on, self._rows), (params, abstract_prompts(prompts, self.mesh), seed_step, chosen)
        paused = rows(self._programs["begin"].trace(*begin).out_info)
        count = len(paused.record.lengths)
        answers = [rows(self._observation({0: Answer([0] * width)}, count)) for width in self._widths]
        last_rewards = jax.ShapeDtypeStruct((count,), jnp.float32, sharding=self._rows)
        return [
            ("begin", begin),
            ("decode", (params, paused, chosen)),
            *(("answer", (params, paused, *seen)) for seen in answers),
            ("finish", (params, paused, last_rewards, chosen)),
        ]

    def _conversations(self, paused: Paused, prompts: Prompts) -> Conversations:
        config, (policy, _) = self._config, self._networks
        keys, ids = processes.fetch((environment_keys(paused.state.keys), prompts.id))
        problems = np.repeat(ids, config.group_size)
        batch, _ = admission(config, len(problems))
        return Conversations(self.environment, problems, keys, policy.vocab_size, batch)

    def _observation(self, answers: dict[int, Answer], rows: int) -> Any:
        """Return the answers as a row of each sequence, and which have one, as numpy."""
        most = max((len(answer.tokens) for answer in answers.values()), default=0)
        width = next(width for width in self._widths if width >= most)
        tokens, count = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        ending, reward = np.zeros(rows, np.int8), np.zeros(rows, np.float32)
        ready = np.zeros(rows, bool)
        for row, answer in answers.items():
            tokens[row, : len(answer.tokens)], count[row] = answer.tokens, len(answer.tokens)
            ending[row], reward[row], ready[row] = answer.ending, answer.reward, True
        seen: Any = tokens, count, ending != Ending.GOING, reward, ending
        return Observation(*seen), ready

    @property
    def _widths(self) -> tuple[int, ...]:
        """Return the widths of observations that programs are compiled for: most answers are short."""
        width = self.environment.width
        return (width // 8, width) if width >= 64 else (width,)

    def _place(self, arrays: Any) -> Any:
        return processes.place(arrays, self._rows)

    def _decoding(self, params: Params, chosen: Choice = None) -> Decoding:
        return Decoding(*self._networks, params, choose_lengths(self._config, chosen))

    def _begin(self, params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice) -> Paused:
        sequences = len(prompts.lengths) * self._config.group_size
        carry = start_rollout(self._decoding(params, chosen), prompts, seed_step, sequences)
        return Paused(carry.state, carry.record, jnp.zeros(1, jnp.int32))

    def _decode(self, params: Params, paused: Paused, chosen: Choice) -> Paused:
        decoding, state = self._decoding(params, chosen), paused.state
        waited = _waiting(state)

        def pause(state: RoundState, number: Int[Array, ""]) -> Bool[Array, ""]:
            return (number >= ROUNDS) | jnp.all(state.idle) | (_waiting(state) > waited)

        state, count = rounds_of_phase(decoding, 0, state, pause)
        return Paused(state, paused.record, paused.rounds + count)

    def _answer(self, params: Params, paused: Paused, seen: Observation, ready: Bool[Array, "B"]) -> Paused:
        state = apply_answers(self._decoding(params), paused.state, seen, ready)
        return Paused(state, paused.record, paused.rounds)

    def _finish(self, params: Params, paused: Paused, last_rewards: Float[Array, "B"], chosen: Choice) -> Rollout:
        decoding, state = self._decoding(params, chosen), paused.state
        # In one phase, plain decoding takes a round for each token of the slowest row but the first.
        phase = paused.rounds[0], decoding.config.draft_length_in(0), jnp.max(state.drawn) - 1
        rollout = finished_record(decoding, Carry(state, None, paused.record), [phase])
        assert rollout.returns is not None
        return replace(rollout, returns=rollout.returns + last_rewards)


def _waiting(state: RoundState) -> Int[Array, ""]:
    assert state.turns is not None
    return jnp.sum(state.turns.waiting, dtype=jnp.int32)


def _rows(paused: Paused) -> Rows:
    state, turns = paused.state, paused.state.turns
    assert turns is not None
    return Rows(*processes.fetch((state.done, turns.waiting, turns.began, state.emitted, state.tokens)))


def check_rollout_fn(rollout_fn: RolloutFn) -> None:
    """Raise ValueError for a rollout function that cannot be divided into the programs of `HostTurns`."""
    if rollout_fn is not speculative_rollout:
        raise ValueError("rollout_fn: must be speculative_rollout with an environment on the host")
