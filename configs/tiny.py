"""A whole run on two CPU cores in minutes: a policy from scratch learns sums.

Wide, shallow and four sequences a core: what a round waits for is the policy's 20 MB of weights, of which each core
reads its own copy, as a GPU waits for its memory. With three drafted tokens it costs about two plain ones; of two rows
a core, which a CPU takes one by one, two to three.
"""

from configs.schema import (
    ArithmeticConfig,
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    EvalConfig,
    RewardConfig,
    RunConfig,
    SpeedupConfig,
    WarmupConfig,
)
from configs.schema.networks import DraftConfig, ModelConfig
from models.config import DecoderConfig
from specjax.mesh import MeshConfig
from specjax.optimizer import OptimizerConfig
from specjax.plan import RolloutConfig

config = RunConfig(
    name="tiny",
    steps=270,
    probe_every=270,
    print_every=20,
    mesh=MeshConfig(data=2),
    model=ModelConfig(
        architecture=DecoderConfig(
            vocab_size=15,
            hidden_size=384,
            intermediate_size=1024,
            num_layers=4,
            num_heads=4,
            num_kv_heads=1,
            head_dim=32,
            qk_norm=True,
        ),
        feature_layers=(1, 2, 3),
        dtype="float32",
    ),
    draft=DraftConfig(intermediate_size=512),
    data=DataConfig(
        tokenizer="characters",
        prompts=2,
        max_prompt_tokens=10,
        arithmetic=ArithmeticConfig(problems=3072, min_terms=3, max_terms=5, max_value=5),
    ),
    reward=RewardConfig(scorer="exact_traced"),
    rollout=RolloutConfig(group_size=4, max_new_tokens=40, draft_length=3),
    policy_optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99, warmup_steps=30),
    draft_optimizer=OptimizerConfig(learning_rate=1e-3, b2=0.98, warmup_steps=20),
    warmup=WarmupConfig(
        steps=65, batch_size=32, optimizer=OptimizerConfig(learning_rate=2e-3, b2=0.98, warmup_steps=20)
    ),
    # For launch.compare alone: in a run the draft learns online.
    distill=DistillConfig(answers=512, chunks=1, batch_size=16),
    eval=EvalConfig(every=270, prompts=256),
    checkpoint=CheckpointConfig(every=135),
    speedup=SpeedupConfig(slots=(4,), draft_lengths=(3,), prompts=2, repeats=24),
)
