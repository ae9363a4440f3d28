"""GSM8K with a small instruction-tuned model: `python -m launch.train gsm8k --model.path Qwen/Qwen3-0.6B`.

- Models: Qwen3-0.6B to Qwen3-1.7B, with thinking off.
- Hardware: one GPU of 80 GB.
- Problems: openai/gsm8k on the hub, or gsm8k/train.jsonl and gsm8k/test.jsonl in $SPECJAX_DATA if that is set. Each
  has a `question`, and an `answer` that ends in "#### NUMBER".
"""

import os
from dataclasses import replace

from configs.own_data import config as own_data
from configs.schema import DataConfig

DATA = os.environ.get("SPECJAX_DATA")

config = replace(
    own_data,
    name="gsm8k",
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
    rollout=replace(own_data.rollout, max_new_tokens=512),
)
