"""A policy of 100 million parameters from scratch on one GPU: `python -m launch.train scratch_100m`.

- Stages: warm-up on worked solutions, distillation of the draft, RL, closing comparison.
- Task: the built-in sums, longer than in `tiny`: up to eight numbers of up to two digits, solved step by step in about
  a hundred characters.
- Purpose: every stage at a size where decoding is bound by memory. Probes time the stages, and draft lengths are chosen
  by the measured cost of rounds.
"""

from configs.schema import (
    ArithmeticConfig,
    CheckpointConfig,
    DataConfig,
    DecoderConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SpeedupConfig,
    WarmupConfig,
)

config = RunConfig(
    name="scratch_100m",
    steps=100,
    probe_every=25,
    print_every=5,
    microbatches=4,
    ladder=(64, 96, 128),
    model=ModelConfig(
        architecture=DecoderConfig(
            vocab_size=15,
            hidden_size=768,
            intermediate_size=2048,
            num_layers=16,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            qk_norm=True,
        ),
        dtype="bfloat16",
    ),
    draft=DraftConfig(),
    data=DataConfig(
        tokenizer="characters",
        prompts=64,
        max_prompt_tokens=24,
        arithmetic=ArithmeticConfig(problems=65_536, min_terms=4, max_terms=8, max_value=99),
    ),
    reward=RewardConfig(scorer="exact_traced"),
    rollout=RolloutOptions(group_size=8, max_new_tokens=128, draft_lengths=(0, 1, 3, 5)),
    policy_optimizer=OptimizerConfig(learning_rate=1e-5, b2=0.99, warmup_steps=10),
    draft_optimizer=OptimizerConfig(learning_rate=3e-4, b2=0.98, warmup_steps=10),
    warmup=WarmupConfig(steps=1500, batch_size=256, optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100)),
    distill=DistillConfig(steps=400, answers=4096, batch_size=128),
    eval=EvalConfig(every=50, prompts=256),
    checkpoint=CheckpointConfig(every=50),
    speedup=SpeedupConfig(steps=15),
)
