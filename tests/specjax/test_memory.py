"""A drafter's memory is kept with the parameters, in steps on a mesh, probes and checkpoints."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.checkpoint import Checkpointer
from specjax.drafters import HistoryDrafter
from specjax.rollout.plan import RolloutConfig
from specjax.train.config import TrainConfig
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.timed_step import ProbeStep
from specjax.train.train_step import make_train_step
from specjax.types import Params, Prompts, Reward, Rollout, TrainState
from tests.chain import COUNTING, chain
from tests.specjax.training import mesh_of

PROBLEMS, KEPT, BUDGET, GROUP = 6, 3, 10, 2
DRAFTER = HistoryDrafter(5, min_n=1, max_n=3, kept=KEPT, siblings=GROUP)
ROLLOUT = RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, draft_length=2, stop_tokens=(4,))


def count_zeros(rollout: Rollout, prompts: Prompts) -> Reward:
    value = jnp.sum(rollout.tokens == 0, axis=1, dtype=jnp.float32)
    return Reward(value, value)


PARTS = chain(5), DRAFTER, count_zeros, TrainConfig(rollout=ROLLOUT)


def fresh(mesh: Mesh) -> TrainState:
    everywhere = NamedSharding(mesh, P())
    params = Params(jnp.copy(COUNTING), {}, DRAFTER.memory.blank(PROBLEMS, BUDGET))
    return init_train_state(jax.device_put(params, everywhere), PARTS[3], mesh)


def prompts_of(*ids: int) -> Prompts:
    tokens = np.resize(np.arange(4, dtype=np.int32), (len(ids), 3))
    return Prompts(*map(jnp.asarray, (tokens, np.full(len(ids), 3, np.int32), np.array(ids, np.int32))))


@pytest.mark.slow
def test_steps_and_probes_leave_the_newest_completions_of_each_prompt_and_saves_keep_them(tmp_path: Path):
    """Programs that generate for other prompts restore no memory."""
    mesh = mesh_of(2, 2)
    step, probe = make_train_step(*PARTS, mesh), ProbeStep(Stages(*PARTS, mesh))
    start, state = fresh(mesh), fresh(mesh)
    expected: list[list[list[int]]] = [[] for _ in range(PROBLEMS)]
    for run, ids in ((step, (3, 0, 5, 1)), (probe, (1, 2, -1, 3)), (step, (2, 1, 4, 0))):
        state, rollout, _ = run(state, prompts_of(*ids))
        tokens, lengths = np.asarray(rollout.tokens), np.asarray(rollout.lengths)
        for n, id in enumerate(ids):
            said = [tokens[r, : lengths[r]].tolist() for r in range(n * GROUP, (n + 1) * GROUP)]
            if id >= 0:
                expected[id] = [*said, *expected[id]][:KEPT]
    memory = np.asarray(state.params.memory)
    for id, completions in enumerate(expected):
        assert [[token - 1 for token in row if token] for row in memory[id].tolist() if any(row)] == completions
    assert sorted({len(completions) for completions in expected}) == [2, 3]
    assert state.params.memory.sharding == start.params.memory.sharding
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(tmp_path, keep=1) as saves:
        saves.save(3, state, {}, {})
        restored = saves.restore(abstract).state.params
        for_other_prompts, _ = saves.restore_params(abstract.params)
    np.testing.assert_array_equal(restored.memory, state.params.memory)
    assert restored.memory.sharding == state.params.memory.sharding
    np.testing.assert_array_equal(for_other_prompts.policy, state.params.policy)
    assert for_other_prompts.memory == ()
