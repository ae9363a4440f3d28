"""A published model on two CPU cores: SmolLM2-135M-Instruct learns to write facts as JSON (launch/data/extraction.py).

    make real                                                    # fetches the model, runs everything, prints the table
    python -m launch.train smollm2_extraction --model.path DIR   # DIR holds the model in Hugging Face layout

Before training the model makes up keys and facts, or writes a program in place of the object.
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
    SamplingLaw,
)

config = RunConfig(
    name="smollm2_extraction",
    steps=50,
    probe_every=0,
    print_every=5,
    # The loss over the policy's 49,152 tokens would be most of the draft's cost.
    draft=DraftConfig(vocab_size=8192),
    data=DataConfig(function="launch.data.extraction:problems", prompts=2, max_prompt_tokens=96),
    reward=RewardConfig(scorer="launch.data.extraction:all_right", also=("launch.data.extraction:right_facts",)),
    # The right object takes 35 tokens or so. At temperature 1, too few first answers hold anything right.
    rollout=RolloutOptions(group_size=8, max_new_tokens=48, draft_lengths=(0, 1, 3), law=SamplingLaw(temperature=0.7)),
    policy_optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=5),
    draft_optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10),
    distill=DistillConfig(steps=192, answers=256, chunks=1, batch_size=8),
    eval=EvalConfig(every=25, prompts=64),
    checkpoint=CheckpointConfig(every=10),
)
