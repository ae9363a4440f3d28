"""Recipe of almost no size, with which `python -m benchmarks.gpu --tiny` rehearses the part `scratch`."""

from configs.override import override
from launch.cli.recipes import load_recipe

config = override(
    load_recipe("tiny"),
    {
        "steps": 2,
        "model.architecture.hidden_size": 32,
        "model.architecture.intermediate_size": 32,
        "model.architecture.num_layers": 2,
        "model.architecture.head_dim": 8,
        "model.feature_layers": (0, 1),
        "model.dtype": "float32",
        "draft.intermediate_size": 32,
        "draft.num_heads": 2,
        "draft.unroll": 1,
        "rollout.draft_length": 2,
        "data.arithmetic.problems": 64,
        "data.held_out_count": 16,
        "warmup.steps": 2,
        "distill.steps": 2,
        "distill.answers": 32,
        "eval.every": 0,
        "probe_every": 0,
    },
)
