"""A published model on two CPU cores: SmolLM2-135M-Instruct learns to write one short sentence with a given word.

    make real                                                   # fetches the model, runs everything, prints the table
    python -m launch.train smollm2_sentences --model.path DIR   # DIR holds the model in Hugging Face layout

Before training the model writes several sentences, or leaves the word out: see launch/data/sentences.py.
"""

from configs.schema import (
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
)

config = RunConfig(
    name="smollm2_sentences",
    steps=50,
    probe_every=0,
    print_every=5,
    # The loss over the policy's 49,152 tokens would be most of the draft's cost.
    draft=DraftConfig(vocab_size=8192),
    data=DataConfig(function="launch.data.sentences:problems", prompts=2, max_prompt_tokens=48),
    reward=RewardConfig(scorer="launch.data.sentences:one_sentence"),
    # 25 words are 35 tokens or so: an answer of 48 tokens is wrong anyway.
    rollout=RolloutOptions(group_size=8, max_new_tokens=48, draft_lengths=(0, 1, 3)),
    policy_optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=5),
    draft_optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10),
    distill=DistillConfig(steps=192, answers=256, chunks=1, batch_size=8),
    eval=EvalConfig(every=25, prompts=64),
    checkpoint=CheckpointConfig(every=10),
)
