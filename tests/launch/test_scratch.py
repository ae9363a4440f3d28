"""`scratch_100m` with networks that a CPU can run: the same path in bfloat16, from warm-up to the last comparison."""

import re
from pathlib import Path

import pytest

from tests.launch.programs import finish, flags, metrics, start

SMALLER = flags(
    "--model.architecture.hidden-size 32 --model.architecture.intermediate-size 32 --model.architecture.num-layers 2",
    "--model.architecture.num-heads 2 --model.architecture.num-kv-heads 1 --model.architecture.head-dim 16",
    "--model.feature-layers 0 1 --mesh.data 1 --steps 4 --probe-every 4 --data.prompts 4",
    "--data.arithmetic.problems 512 --data.held-out-count 16 --rollout.group-size 4 --rollout.max-new-tokens 104",
    "--rollout.draft-lengths 0 1 --ladder 64 --warmup.steps 3 --warmup.batch-size 8 --distill.steps 4",
    "--distill.answers 16 --distill.batch-size 8 --eval.every 4 --eval.prompts 8 --checkpoint.every 4",
    "--speedup.slots 4 --speedup.draft-lengths 1 --speedup.prompts 2 --speedup.repeats 2",
)


@pytest.mark.slow
def test_scratch_100m_runs_on_a_cpu(tmp_path: Path):
    said = finish(start("scratch_100m", SMALLER | {"--out": str(tmp_path / "run")}))
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    stages = ["time/prepare", "time/generation", "time/logprob", "time/train"]
    for step in steps:
        assert all((step[name] is not None) == (step["step"] == 4) for name in stages)
    assert (tmp_path / "run" / "cost_table.json").exists()
    assert len(re.findall(r"speed-up \S+ \[\S+, \S+\]: alpha", said)) == 2 and "slots" in said
