"""A whole run in minutes on two CPU cores: a policy with random weights learns sums.

The policy is wide and shallow. A round of few sequences is bound by reading its 21 MB of weights, as on a GPU. A round
of four rows with four drafted tokens each costs 2.3 to 2.4 plain rounds in bfloat16, on a CPU with bfloat16 matrix
tiles, and 2.9 to 3.0 in float32.
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
    name="tiny",
    steps=320,
    probe_every=320,
    print_every=40,
    model=ModelConfig(
        architecture=DecoderConfig(
            vocab_size=15,
            hidden_size=544,
            intermediate_size=1504,
            num_layers=4,
            num_heads=4,
            num_kv_heads=1,
            head_dim=32,
            qk_norm=True,
        ),
        # The draft learns as much from one layer as from three: acceptance length 3.9 with either.
        feature_layers=(3,),
        dtype="bfloat16",
    ),
    # A sum copies from several places, so the draft needs many heads. Acceptance length with 4, 6 and 8 heads of 32:
    # 3.4, 3.6 and 3.9. With 12 heads of 16, which cost less: 3.9.
    draft=DraftConfig(intermediate_size=192, num_heads=12, num_kv_heads=2, head_dim=16, unroll=4),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        arithmetic=ArithmeticConfig(problems=3072, min_terms=3, max_terms=5, max_value=5),
    ),
    reward=RewardConfig(scorer="exact_traced"),
    rollout=RolloutOptions(group_size=3, max_new_tokens=40, draft_length=4),
    # One length for all rows: in 320 steps of distillation, another one saves less than its programs take to compile.
    ladder=(50,),
    policy_optimizer=OptimizerConfig(learning_rate=4e-5, b2=0.99, warmup_steps=30),
    # A step has only six sequences: the draft learns more with a decaying learning rate.
    draft_optimizer=OptimizerConfig(
        learning_rate=2e-3, b2=0.98, warmup_steps=20, schedule="cosine", decay_steps=300, floor=0.1
    ),
    warmup=WarmupConfig(
        steps=80, batch_size=24, optimizer=OptimizerConfig(learning_rate=2e-3, b2=0.98, warmup_steps=20)
    ),
    distill=DistillConfig(steps=320, answers=640, chunks=1, batch_size=12),
    eval=EvalConfig(every=320, prompts=192),
    checkpoint=CheckpointConfig(every=160),
    speedup=SpeedupConfig(steps=16),
)
