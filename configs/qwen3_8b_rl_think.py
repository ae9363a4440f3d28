"""RL-Think of arXiv 2604.26779: GRPO of a thinking model, with rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_think --model.path QWEN3_8B --data.train DAPO --data.held-out AIME

From the paper:
- Qwen3-8B with thinking on; GRPO at temperature 1; EAGLE-3 at draft length 3
- DAPO-Math-17K to train on, AIME 2024 to validate on

Not published, from the closest public recipe (NeMo RL's grpo-qwen3-8b):
- prompts of up to 2,048 tokens and 18,432 new ones; 32 prompts with 16 samples
- learning rate 1e-6; ratio clipped at 0.2 and 0.28; importance weight truncated at 2; no KL

Our own:
- number of steps; phases, ladder and microbatches, which change no token; draft length 0 where 3 does not pay
- The draft starts untrained and is distilled from every rollout. The paper's was trained on DAPO first and frozen.

Data: DAPO and AIME are JSONL files. Each line has a `problem` and an `answer`; the problem has no instructions.

Draft vocabulary: the 32,000 most frequent tokens of the problems. If fewer occur, the lowest ids are added; these are
the earliest merges of the byte-pair encoding. A vocabulary head over all 151,936 tokens would have 622M parameters
instead of 131M, read at every draft step. A draft checkpoint has its own vocabulary: --draft.path DIR
--draft.vocab-size None.

Minimum mesh: 8 GPUs of 141 GB along `fsdp`, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. GiB per GPU:
- master weights and moments in float32: 12
- gradients: 4
- bfloat16 copy: 16
- caches of 32 slots: 93. Sequences wait for slots; a slot takes 2.9 for its 20,480 positions.
- total as `launch.plan` counts it for H200: 122 to generate, 79 to update
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
    name="qwen3_8b_rl_think",
    steps=200,
    microbatches=64,
    ladder=(4096, 8192),
    logit_chunk=2048,
    mesh=MeshConfig(fsdp=8),
    model=ModelConfig(remat="dots"),
    draft=DraftConfig(vocab_size=32_000),
    data=DataConfig(
        prompt_field="problem",
        answer_field="answer",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        chat_template_kwargs={"enable_thinking": True},
        prompts=32,
        max_prompt_tokens=2048,
    ),
    reward=RewardConfig(scorer="math", workers=8),
    rollout=RolloutOptions(
        group_size=16,
        max_new_tokens=18_432,
        draft_lengths=(0, 3),
        phases=((32, 20_480), (8, 20_480)),
        law=SamplingLaw(temperature=1.0),
    ),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    distill=DistillConfig(microbatches=16),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
