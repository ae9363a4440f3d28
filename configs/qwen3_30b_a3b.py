"""GRPO of Qwen3-30B-A3B, a mixture of experts, with rollouts drafted by EAGLE-3. Not run yet.

    python -m launch.train qwen3_30b_a3b --model.path Qwen/Qwen3-30B-A3B --data.train DAPO --data.held-out AIME

The task, GRPO's options and the draft are in `configs/qwen3_math.py`, with up to 3,072 new tokens; the chat template's
thinking is off.

Experts: training replays the experts of the rollout, so that both are one policy although bfloat16 rounds differently
in the two. No load-balance loss, as in other public RL recipes for this model (slime).

Draft length 0 where 3 does not pay: a verification of several tokens reads more experts than one token does.

Minimum mesh: 16 GPUs of 141 GB, 2 along `fsdp`, 2 along `expert` and 4 along `tensor`, with
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment (docs/plan.md).
GiB per GPU, by the sizes of arrays and without activations, which take 85 in an update:
- master weights and moments in float32: 23
- gradients: 8; their sum over microbatches: 8
- bfloat16 copy: 8
- caches: 25
"""

from dataclasses import replace

from configs.qwen3_math import base
from configs.schema import DistillConfig, MeshConfig, ModelConfig

config = replace(
    base,
    name="qwen3_30b_a3b",
    microbatches=32,
    ladder=(1024, 2048, 3072),
    mesh=MeshConfig(fsdp=2, expert=2, tensor=4),
    model=ModelConfig(remat="full"),
    data=replace(base.data, chat_template_kwargs={"enable_thinking": False}),
    rollout=replace(base.rollout, max_new_tokens=3072, phases=((256, 4096), (64, 4096), (16, 4096))),
    loss=replace(base.loss, routing="replay"),
    distill=DistillConfig(microbatches=32),
)
