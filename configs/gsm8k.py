"""GSM8K with a small instruction-tuned model: `python -m launch.train gsm8k --model.path Qwen/Qwen3-0.6B`.

- Models: Qwen3-0.6B to Qwen3-1.7B, with thinking off.
- Hardware: one GPU of 80 GB.
- Problems: openai/gsm8k on the hub, or gsm8k/train.jsonl and gsm8k/test.jsonl in $SPECJAX_DATA if that is set. Each
  has a `question`, and an `answer` that ends in "#### NUMBER".
"""

import os

from configs.schema import (
    DataConfig,
    DistillConfig,
    EvalConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
)

DATA = os.environ.get("SPECJAX_DATA")

config = RunConfig(
    name="gsm8k",
    steps=200,
    microbatches=64,
    data=DataConfig(
        train=f"{DATA}/gsm8k/train.jsonl" if DATA else "openai/gsm8k:main/train",
        held_out=f"{DATA}/gsm8k/test.jsonl" if DATA else "openai/gsm8k:main/test",
        prompt_field="question",
        answer_field="answer",
        answer_after="####",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        chat_template_kwargs={"enable_thinking": False},
        prompts=32,
        max_prompt_tokens=320,
    ),
    reward=RewardConfig(scorer="math", workers=4),
    rollout=RolloutOptions(group_size=8, max_new_tokens=512, draft_lengths=(0, 3)),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    draft_optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10),
    distill=DistillConfig(microbatches=8),
    eval=EvalConfig(every=20, prompts=256),
)
