"""Sums as in `tiny`, with numbers up to nine, and a deep, narrow policy: experiments take minutes on two CPU cores.

Drafting hardly pays here. The weights fit in the cache, and each core decodes four sequences, so the cost of a round is
its start-up plus the arithmetic of its tokens. A round with three drafted tokens costs 2.6 to 2.8 plain rounds.
"""

from configs.schema import (
    ArithmeticConfig,
    CheckpointConfig,
    DataConfig,
    DecoderConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SpeedupConfig,
    WarmupConfig,
)

config = RunConfig(
    name="narrow",
    steps=1000,
    probe_every=500,
    print_every=20,
    mesh=MeshConfig(data=2),
    model=ModelConfig(
        architecture=DecoderConfig(
            vocab_size=15,
            hidden_size=48,
            intermediate_size=128,
            num_layers=12,
            num_heads=3,
            num_kv_heads=1,
            head_dim=16,
            qk_norm=True,
        ),
        dtype="float32",
    ),
    draft=DraftConfig(intermediate_size=192),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        arithmetic=ArithmeticConfig(problems=4096, min_terms=3, max_terms=5, max_value=9),
    ),
    reward=RewardConfig(scorer="exact_traced"),
    rollout=RolloutOptions(group_size=4, max_new_tokens=40, draft_length=3),
    policy_optimizer=OptimizerConfig(learning_rate=1.3e-4, b2=0.99, warmup_steps=30),
    draft_optimizer=OptimizerConfig(learning_rate=5e-3, b2=0.98, warmup_steps=20),
    warmup=WarmupConfig(steps=300, batch_size=32, optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30)),
    # For launch.compare. A run does not distil before RL (steps = 0); its draft learns online.
    distill=DistillConfig(answers=512, chunks=1, batch_size=16),
    eval=EvalConfig(every=500, prompts=256),
    checkpoint=CheckpointConfig(every=500),
    speedup=SpeedupConfig(steps=100),
)
