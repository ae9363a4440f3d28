"""The options that the recipes of Qwen3 on mathematical problems share: the task, GRPO and the draft.

From arXiv 2604.26779:
- GRPO at temperature 1; EAGLE-3 at draft length 3
- DAPO-Math-17K to train on, AIME 2024 to validate on

Not published, from the closest public recipe (NeMo RL's grpo-qwen3-8b):
- 32 prompts with 16 samples
- learning rate 1e-6; ratio clipped at 0.2 and 0.28; importance weight truncated at 2; no KL

Our own:
- number of steps; draft length 0 where 3 does not pay
- what is said while thinking is not scored
- The draft starts untrained, so that it is not used: distil it first, by launch.distill or --distill.steps 512, as the
  paper's was trained on DAPO. In RL it is then distilled from the rollouts; the paper's was frozen.

Data: DAPO and AIME are JSONL files. Each line has a `problem` and an `answer`; the problem has no instructions.

Draft vocabulary: the 32,000 most frequent tokens of the problems. If fewer occur, the lowest ids are added; these are
the earliest merges of the byte-pair encoding. A vocabulary head over all 151,936 tokens would have 622M parameters
instead of 131M, read at every draft step. A draft checkpoint (--draft.path DIR) has its own vocabulary.
"""

from configs.schema import (
    DataConfig,
    DraftConfig,
    EvalConfig,
    LossOptions,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SamplingLaw,
)

base = RunConfig(
    name="qwen3_math",
    steps=200,
    draft=DraftConfig(vocab_size=32_000),
    data=DataConfig(
        prompt_field="problem",
        answer_field="answer",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        prompts=32,
        max_prompt_tokens=1024,
    ),
    reward=RewardConfig(scorer="math", thinking=("<think>", "</think>"), workers=8),
    rollout=RolloutOptions(group_size=16, draft_lengths=(0, 3), law=SamplingLaw(temperature=1.0)),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
