"""GRPO of Qwen3-30B-A3B, a mixture of experts, with rollouts drafted by EAGLE-3. Not run yet.

    python -m launch.train qwen3_30b_a3b --model.path Qwen/Qwen3-30B-A3B --data.train DAPO --data.held-out AIME

Problems, prompts and learning rate are those of `qwen3_8b_rl_zero`, with up to 3,072 new tokens; the chat template's
thinking is off.

Experts: training replays the experts of the rollout, so that both are one policy although bfloat16 rounds differently
in the two. No load-balance loss, as in other public RL recipes for this model (slime).

Draft: an EAGLE-3 head with random weights, distilled from every rollout, over the 32,000 most frequent tokens of the
problems. Draft length 0 where 3 does not pay: a verification of several tokens reads more experts than one token does.

Minimum mesh: 16 GPUs of 141 GB, 2 along `fsdp`, 2 along `expert` and 4 along `tensor`, with
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment (docs/plan.md).
GiB per GPU, by the sizes of arrays and without activations, which take 85 in an update:
- master weights and moments in float32: 23
- gradients: 8; their sum over microbatches: 8
- bfloat16 copy: 8
- caches: 25
"""

from configs.schema import (
    DataConfig,
    DistillConfig,
    DraftConfig,
    EvalConfig,
    LossOptions,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
    SamplingLaw,
)

config = RunConfig(
    name="qwen3_30b_a3b",
    steps=200,
    microbatches=32,
    ladder=(1024, 2048, 3072),
    mesh=MeshConfig(fsdp=2, expert=2, tensor=4),
    model=ModelConfig(remat="full"),
    draft=DraftConfig(vocab_size=32_000),
    data=DataConfig(
        prompt_field="problem",
        answer_field="answer",
        instruction="{prompt}\nReason step by step, and put your final answer within \\boxed{{}}.",
        chat_template_kwargs={"enable_thinking": False},
        prompts=32,
        max_prompt_tokens=1024,
    ),
    reward=RewardConfig(scorer="math", workers=8),
    rollout=RolloutOptions(
        group_size=16,
        max_new_tokens=3072,
        draft_lengths=(0, 3),
        phases=((256, 4096), (64, 4096), (16, 4096)),
        law=SamplingLaw(temperature=1.0),
    ),
    loss=LossOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0, kl_coefficient=0.0, routing="replay"),
    policy_optimizer=OptimizerConfig(learning_rate=1e-6),
    draft_optimizer=OptimizerConfig(learning_rate=1e-4),
    distill=DistillConfig(microbatches=32),
    eval=EvalConfig(every=20, prompts=30, samples=16),
)
