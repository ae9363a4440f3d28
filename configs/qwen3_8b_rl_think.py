"""RL-Think of arXiv 2604.26779: GRPO of a thinking model, with rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_think --model.path QWEN3_8B --data.train DAPO --data.held-out AIME

The model is the paper's Qwen3-8B with thinking on; the task, GRPO's options and the draft are in
`configs/qwen3_math.py`.

- Prompts of up to 2,048 tokens and 18,432 new ones are not published, but of the closest public recipe (NeMo RL's
  grpo-qwen3-8b).
- Phases, ladder and microbatches are our own; they change no token.

Minimum mesh: 8 GPUs of 141 GB along `fsdp`, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. GiB per GPU:
- master weights and moments in float32: 12
- gradients: 4
- bfloat16 copy: 16
- caches of 32 slots: 93. Sequences wait for slots; a slot takes 2.9 for its 20,480 positions.
- total as `launch.plan` counts it for H200: 122 to generate, 85 to update
"""

from dataclasses import replace

from configs.qwen3_math import base
from configs.schema import DistillConfig, MeshConfig, ModelConfig

config = replace(
    base,
    name="qwen3_8b_rl_think",
    microbatches=64,
    ladder=(4096, 8192),
    mesh=MeshConfig(fsdp=8),
    model=ModelConfig(remat="dots"),
    data=replace(base.data, chat_template_kwargs={"enable_thinking": True}, max_prompt_tokens=2048),
    rollout=replace(base.rollout, max_new_tokens=18_432, phases=((32, 20_480), (8, 20_480))),
    distill=DistillConfig(microbatches=16),
)
