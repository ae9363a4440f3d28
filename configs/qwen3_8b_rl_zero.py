"""RL-Zero of arXiv 2604.26779: GRPO from a base model, rollouts drafted by EAGLE-3.

    python -m launch.train qwen3_8b_rl_zero --model.path QWEN3_8B_BASE --data.train DAPO --data.held-out AIME

Published, and taken over: Qwen3-8B-Base, DAPO-Math-17K to train on, AIME 2024 to validate on, GRPO at temperature 1,
EAGLE-3 at draft length 3. Not published, and taken from the closest public recipe, NeMo RL's grpo-qwen3-8b: 32 prompts
of 16 samples, learning rate 1e-6, the ratio clipped at 0.2 and 0.28, the importance weight truncated at 2, no KL. Our
own: 1,024 + 3,072 tokens (that recipe's 2,048 + 18,432 are for a model that thinks), the number of steps, phases and
ladder (which change no token), draft length 0 where 3 does not pay, and a draft that starts untrained and is distilled
from every rollout, where the paper's was trained on DAPO beforehand and frozen.

DAPO and AIME are JSONL files whose lines have a `problem` and an `answer`, without instructions of their own.

The draft knows 32,000 tokens, those that come most often in the problems and, where these are fewer, the lowest ids,
which byte pairs that are merged early have. Over all 151,936 its vocabulary head would be 622M parameters instead of
131M, read at every draft step. A draft from elsewhere has its own: --draft.path DIR --draft.vocab-size None.

Minimum mesh: 8 GPUs of 141 GB along `tensor`. Each then holds, in GiB, 12 of master weights and moments in float32,
4 of gradients and as many of those being added, 2 of the bfloat16 copy and 37 of caches; XLA counts 118 with all
activations (without phases and ladder, for a draft of the whole vocabulary), for which XLA_PYTHON_CLIENT_MEM_FRACTION
must be 0.95.
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
    name="qwen3_8b_rl_zero",
    steps=200,
    microbatches=512,
    ladder=(1024, 2048, 3072),
    mesh=MeshConfig(tensor=8),
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
        max_new_tokens=3072,
        draft_lengths=(0, 3),
        phases=((512, 4096), (128, 4096), (32, 4096)),
        law=SamplingLaw(temperature=1.0),
        # The base model's own <|endoftext|>, and <|im_end|>, by which the chat template ends a turn.
        stop_tokens=(151643, 151645),
    ),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    distill=DistillConfig(microbatches=32),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
