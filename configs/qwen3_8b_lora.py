"""GRPO of Qwen3-8B with adapters on one GPU of 80 GB, with rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_lora --model.path QWEN3_8B_BASE --data.train DAPO --data.held-out AIME

The task, GRPO's options and the draft are in `configs/qwen3_math.py`. Here the policy's weights are frozen in bfloat16,
and adapters of rank 32 are trained beside them (docs/lora.md). Our own:
- learning rate 1e-5, ten times that of full training
- 4,096 new tokens, phases, ladder and microbatches, for the memory

Minimum: one GPU of 80 GB, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. GiB:
- frozen weights in bfloat16: 15.3
- adapters and draft in float32: 1.8; their moments: 3.6; their gradients: 1.8
- caches of 48 slots: 34.7. Sequences wait for slots; a slot takes 0.7 for its 5,120 positions.
- total as `launch.plan` counts it for H100: 66 to generate, 44 to update
"""

from dataclasses import replace

from configs.qwen3_math import base
from configs.schema import DistillConfig, LoraConfig, ModelConfig

config = replace(
    base,
    name="qwen3_8b_lora",
    microbatches=64,
    ladder=(1024, 2048, 3072),
    model=ModelConfig(remat="full"),
    lora=LoraConfig(rank=32),
    policy_optimizer=replace(base.policy_optimizer, learning_rate=1e-5),
    rollout=replace(
        base.rollout,
        max_new_tokens=4096,
        phases=((48, 5120), (12, 5120)),
        # <|endoftext|>, which the base model emits, and <|im_end|>, which ends a turn in the chat template.
        stop_tokens=(151643, 151645),
    ),
    distill=DistillConfig(microbatches=32),
)
