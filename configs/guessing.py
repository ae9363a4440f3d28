"""A policy with random weights learns over turns: it finds a letter by guesses that are answered by < or >."""

from configs.schema import (
    CheckpointConfig,
    DataConfig,
    DecoderConfig,
    DraftConfig,
    EnvironmentConfig,
    EvalConfig,
    LossOptions,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    WarmupConfig,
)

config = RunConfig(
    name="guessing",
    steps=400,
    probe_every=0,
    print_every=20,
    model=ModelConfig(
        architecture=DecoderConfig(
            vocab_size=257,
            hidden_size=128,
            intermediate_size=256,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            qk_norm=True,
        ),
        feature_layers=(1,),
        dtype="float32",
    ),
    draft=DraftConfig(intermediate_size=128),
    data=DataConfig(
        tokenizer="bytes",
        function="launch.environments.traced_guessing:problems",
        prompts=16,
        max_prompt_tokens=8,
    ),
    environment=EnvironmentConfig(function="launch.environments.traced_guessing:Guessing", answer_tokens=1),
    reward=RewardConfig(scorer="environment"),
    # Five guesses, each with its stop token, and four answers. Turns are short, so all rows wait for the host together.
    rollout=RolloutOptions(group_size=16, max_new_tokens=14, turns=5, turn_tokens=2, draft_length=2, admit=256),
    # Towards the random guesses that the warm-up teaches, so that exploration goes on.
    loss=LossOptions(kl_coefficient=0.03, kl_estimator="k2"),
    policy_optimizer=OptimizerConfig(learning_rate=1e-3, b2=0.99, warmup_steps=10),
    draft_optimizer=OptimizerConfig(learning_rate=2e-3, b2=0.98, warmup_steps=20),
    warmup=WarmupConfig(
        steps=100, batch_size=64, optimizer=OptimizerConfig(learning_rate=2e-3, b2=0.98, warmup_steps=20)
    ),
    eval=EvalConfig(every=100, prompts=100),
    checkpoint=CheckpointConfig(every=200),
)
