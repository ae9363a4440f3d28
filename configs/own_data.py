r"""Your own data: `python -m launch.train own_data --model.path MODEL --data.train FILE`.

- Records: a `prompt`, text or chat messages, and an `answer`. `--data.prompt-field` and `--data.answer-field` name
  other fields; in verl's files the answer is `reward_model.ground_truth`.
- Prompts are asked as they are: nothing is added to them. Bare problems may need
  `--data.instruction '{prompt} Put your final answer within \boxed{{}}.'`, or `--data.system-prompt`.
- `python -m launch.generate own_data --model.path MODEL --data.train FILE --samples 0` shows the first prompt as the
  model is asked.
- Held out: the last 256 problems, or a fifth if that is fewer, or the file `--data.held-out`.
- Reward: math, which compares the boxed number or expression after the thinking, or else the last one.
  `--reward.scorer` takes others.
"""

from configs.schema import (
    DataConfig,
    DistillConfig,
    EvalConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
)

config = RunConfig(
    name="own_data",
    steps=200,
    microbatches=64,
    data=DataConfig(prompt_field="prompt", answer_field="answer", prompts=32, max_prompt_tokens=1024),
    reward=RewardConfig(scorer="math", thinking=("<think>", "</think>"), workers=4),
    rollout=RolloutOptions(group_size=8, max_new_tokens=1024, draft_lengths=(0, 3)),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    draft_optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10),
    distill=DistillConfig(microbatches=8),
    eval=EvalConfig(every=20, prompts=256),
)
