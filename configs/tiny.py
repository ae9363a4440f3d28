"""A whole run on two CPU cores in minutes: a policy from scratch learns sums.

Wide and shallow: what a round of few sequences waits for is the policy's 21 MB of weights, as a GPU waits for its
memory. With four drafted tokens each, four rows wait as long as for 2.3 to 2.4 plain ones, on a CPU that multiplies
tiles of bfloat16; in float32 it was 2.9 to 3.0.
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
        # Of this policy the draft learns as much from one layer as from three: 3.9 tokens a round with either.
        feature_layers=(3,),
        dtype="bfloat16",
    ),
    # Sums are copied from several places: with 4, 6 and 8 heads of 32 it came to 3.4, 3.6 and 3.9 tokens a round, as
    # with 12 of 16, which cost less.
    draft=DraftConfig(intermediate_size=192, num_heads=12, num_kv_heads=2, head_dim=16, unroll=4),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        arithmetic=ArithmeticConfig(problems=3072, min_terms=3, max_terms=5, max_value=5),
    ),
    reward=RewardConfig(scorer="exact_traced"),
    rollout=RolloutOptions(group_size=3, max_new_tokens=40, draft_length=4),
    policy_optimizer=OptimizerConfig(learning_rate=4e-5, b2=0.99, warmup_steps=30),
    # Of six sequences a step, a draft learns more the smaller its steps become.
    draft_optimizer=OptimizerConfig(
        learning_rate=2e-3, b2=0.98, warmup_steps=20, schedule="cosine", decay_steps=300, floor=0.1
    ),
    warmup=WarmupConfig(
        steps=80, batch_size=24, optimizer=OptimizerConfig(learning_rate=2e-3, b2=0.98, warmup_steps=20)
    ),
    distill=DistillConfig(steps=320, answers=640, chunks=1, batch_size=12),
    eval=EvalConfig(every=320, prompts=192),
    checkpoint=CheckpointConfig(every=160),
    speedup=SpeedupConfig(slots=(6,), draft_lengths=(3, 4), prompts=2, repeats=16),
)
