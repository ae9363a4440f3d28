"""RL-Think of arXiv 2604.26779: GRPO of a model that thinks, rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_think --model.path QWEN3_8B --data.train DAPO --data.held-out AIME

Published, and taken over: Qwen3-8B with thinking on, DAPO-Math-17K to train on, AIME 2024 to validate on, GRPO at
temperature 1, EAGLE-3 at draft length 3. Not published, and taken from the closest public recipe, NeMo RL's
grpo-qwen3-8b: prompts of up to 2,048 tokens, 32 of them with 16 samples, learning rate 1e-6, the ratio clipped at 0.2
and 0.28, the importance weight truncated at 2, no KL. Our own: 4,096 new tokens, by which many a thought is cut short
(that recipe's 18,432 do not fit while attention keeps its weights for the backward pass), the number of steps, phases
and ladder (which change no token), draft length 0 where 3 does not pay, and a draft that starts untrained and is
distilled from every rollout, where the paper's was trained on DAPO beforehand and frozen.

DAPO and AIME are JSONL files whose lines have a `problem` and an `answer`, without instructions of their own.

The draft knows 32,000 tokens, those that come most often in the problems and, where these are fewer, the lowest ids,
which byte pairs that are merged early have. Over all 151,936 its vocabulary head would be 622M parameters instead of
131M, read at every draft step. A draft from elsewhere has its own: --draft.path DIR --draft.vocab-size None.

Minimum mesh: 16 GPUs of 141 GB, 2 along `fsdp` and 8 along `tensor`. Each then holds, in GiB, 6 of master weights and
moments in float32, 2 of gradients and as many of those being added, 2 of the bfloat16 copy and 28 of caches; XLA counts
108 with all activations (without phases and ladder, for a draft of the whole vocabulary), for which
XLA_PYTHON_CLIENT_MEM_FRACTION must be 0.95.
"""

from configs.schema import (
    DataConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    LossOptions,
    MeshConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SamplingLaw,
)

config = RunConfig(
    name="qwen3_8b_rl_think",
    steps=200,
    microbatches=256,
    ladder=(2048, 4096),
    mesh=MeshConfig(fsdp=2, tensor=8),
    draft=DraftConfig(vocab_size=32_000),
    data=DataConfig(
        prompt_field="problem",
        answer_field="answer",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        enable_thinking=True,
        prompts=32,
        max_prompt_tokens=2048,
    ),
    reward=RewardConfig(scorer="math", workers=8),
    rollout=RolloutOptions(
        group_size=16,
        max_new_tokens=4096,
        draft_lengths=(0, 3),
        phases=((256, 6144), (64, 6144), (16, 6144)),
        law=SamplingLaw(temperature=1.0),
    ),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    distill=DistillConfig(microbatches=16),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
