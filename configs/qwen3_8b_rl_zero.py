"""RL-Zero of arXiv 2604.26779: GRPO of a base model, with rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_zero --model.path QWEN3_8B_BASE --data.train DAPO --data.held-out AIME

The model is the paper's Qwen3-8B-Base; the task, GRPO's options and the draft are in `configs/qwen3_math.py`.

- 18,432 new tokens are not published, but of the closest public recipe (NeMo RL's grpo-qwen3-8b).
- 1,024 prompt tokens are our own. NeMo RL's 2,048 are for a thinking model.
- Phases, ladder and microbatches are our own too; they change no token.

Minimum mesh: 8 GPUs of 80 GB along `fsdp`, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. GiB per GPU:
- master weights and moments in float32: 12
- gradients: 4
- bfloat16 copy: 16
- caches of 12 slots: 33. Sequences wait for slots; a slot takes 2.7 for its 19,456 positions. A GPU of 141 GB has room
  for 32.
- total as `launch.plan` counts it for H100: 64 to generate, 55 to update
"""

from dataclasses import replace

from configs.qwen3_math import base
from configs.schema import DistillConfig, MeshConfig, ModelConfig

config = replace(
    base,
    name="qwen3_8b_rl_zero",
    microbatches=16,
    ladder=(2048, 4096, 8192),
    mesh=MeshConfig(fsdp=8),
    model=ModelConfig(remat="full"),
    rollout=replace(
        base.rollout,
        max_new_tokens=18_432,
        phases=((12, 19_456), (4, 19_456)),
        # <|endoftext|>, which the base model emits, and <|im_end|>, which ends a turn in the chat template.
        stop_tokens=(151643, 151645),
    ),
    distill=DistillConfig(microbatches=32),
)
