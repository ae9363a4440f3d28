"""RL-Zero of arXiv 2604.26779: GRPO of a base model, with rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_zero --model.path QWEN3_8B_BASE --data.train DAPO --data.held-out AIME

From the paper:
- Qwen3-8B-Base; GRPO at temperature 1; EAGLE-3 at draft length 3
- DAPO-Math-17K to train on, AIME 2024 to validate on

Not published, from the closest public recipe (NeMo RL's grpo-qwen3-8b):
- 18,432 new tokens; 32 prompts with 16 samples
- learning rate 1e-6; ratio clipped at 0.2 and 0.28; importance weight truncated at 2; no KL

Our own:
- 1,024 prompt tokens. NeMo RL's 2,048 are for a thinking model.
- number of steps; phases, ladder and microbatches, which change no token; draft length 0 where 3 does not pay
- The draft starts untrained and is distilled from every rollout. The paper's was trained on DAPO first and frozen.

Data: DAPO and AIME are JSONL files. Each line has a `problem` and an `answer`; the problem has no instructions.

Draft vocabulary: the 32,000 most frequent tokens of the problems. If fewer occur, the lowest ids are added; these are
the earliest merges of the byte-pair encoding. A vocabulary head over all 151,936 tokens would have 622M parameters
instead of 131M, read at every draft step. A draft checkpoint has its own vocabulary: --draft.path DIR
--draft.vocab-size None.

Minimum mesh: 8 GPUs of 80 GB along `fsdp`, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. GiB per GPU:
- master weights and moments in float32: 12
- gradients: 4
- bfloat16 copy: 16
- caches of 12 slots: 33. Sequences wait for slots; a slot takes 2.7 for its 19,456 positions. A GPU of 141 GB has room
  for 32.
- total as `launch.plan` counts it for H100: 64 to generate, 55 to update
"""

from configs.schema import (
    DataConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    LossOptions,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SamplingLaw,
)

config = RunConfig(
    name="qwen3_8b_rl_zero",
    steps=200,
    microbatches=16,
    ladder=(2048, 4096, 8192),
    logit_chunk=2048,
    mesh=MeshConfig(fsdp=8),
    model=ModelConfig(remat="full"),
    draft=DraftConfig(vocab_size=32_000),
    data=DataConfig(
        prompt_field="problem",
        answer_field="answer",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        prompts=32,
        max_prompt_tokens=1024,
    ),
    reward=RewardConfig(scorer="math", workers=8),
    rollout=RolloutOptions(
        group_size=16,
        max_new_tokens=18_432,
        draft_lengths=(0, 3),
        phases=((12, 19_456), (4, 19_456)),
        law=SamplingLaw(temperature=1.0),
        # <|endoftext|>, which the base model emits, and <|im_end|>, which ends a turn in the chat template.
        stop_tokens=(151643, 151645),
    ),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    distill=DistillConfig(microbatches=32),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
