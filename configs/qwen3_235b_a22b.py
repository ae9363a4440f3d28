"""GRPO of Qwen3-235B-A22B, a mixture of experts, with rollouts drafted by EAGLE-3. Not run yet.

    python -m launch.train qwen3_235b_a22b --model.path Qwen/Qwen3-235B-A22B --data.train DAPO --data.held-out AIME

As `qwen3_30b_a3b`, but for the mesh and the batches that it allows.

Minimum mesh: 64 GPUs of 141 GB, 4 along each of `fsdp`, `expert` and `tensor`.
GiB per GPU, by the sizes of arrays and without activations:
- master weights and moments in float32: 46
- gradients: 15; their sum over microbatches: 15
- bfloat16 copy: 30
- caches: 24
"""

from dataclasses import replace

from configs.qwen3_30b_a3b import config as smaller
from configs.schema import MeshConfig

config = replace(
    smaller,
    name="qwen3_235b_a22b",
    microbatches=128,
    mesh=MeshConfig(fsdp=4, expert=4, tensor=4),
    rollout=replace(smaller.rollout, phases=((128, 4096), (32, 4096), (8, 4096))),
)
