"""Recipe options that each program reads, as paths of fields or of whole sections."""

from collections.abc import Sequence

# Set only in recipe files: network shapes, the task, and settings that few runs change.
RECIPE_ONLY = (
    *("name", "model.architecture", "lora.rslora", "lora.rank_pattern", "draft.architecture", "draft.head"),
    *("draft.intermediate_size", "draft.num_heads", "draft.num_kv_heads", "draft.head_dim"),
    *("draft.lookup.min_n", "draft.lookup.max_n", "draft.lookup.factor", "draft.lookup.offset"),
    *("data.function", "data.arithmetic", "data.chat_template_time", "rollout.admit", "rollout.kept_prompts"),
    *("rollout.environment", "reward.code"),
    *(f"{name}.{field}" for name in ("policy_optimizer", "draft_optimizer") for field in ("b1", "b2", "momentum")),
    *("draft_optimizer.kind", "draft_optimizer.weight_decay", "draft_optimizer.clip_norm"),
    *(f"warmup.optimizer.{field}" for field in ("kind", "schedule", "decay_steps", "floor", "b1", "b2", "momentum")),
    *("warmup.optimizer.weight_decay", "warmup.optimizer.clip_norm"),
)

_NETWORKS = (
    *("mesh", "model.path", "model.family", "model.feature_layers", "model.dtype", "model.param_dtype"),
    *("lora", "draft.kind", "draft.path", "draft.vocab_size", "draft.mtp_convention", "draft.lookup"),
    *("rollout.draft_length", "rollout.draft_lengths", "rollout.max_new_tokens", "rollout.stop_tokens"),
    *("rollout.stop_strings", "rollout.replace_stop_tokens"),
)
# The problems are needed because a draft's vocabulary is chosen from them.
_PROBLEMS = (
    *("seed", "data.train", "data.held_out", "data.held_out_count", "data.prompt_field", "data.answer_field"),
    *("data.solution_field", "data.answer_after", "data.instruction", "data.tokenizer", "data.system_prompt"),
    *("data.tools_field", "data.chat_template_kwargs", "data.max_prompt_tokens"),
)
# All but carry-over: only runs go on with sequences of an earlier step.
_TURNS = ("environment", "rollout.turns", "rollout.turn_tokens")
_ROLLOUT = ("rollout.group_size", "rollout.function", "rollout.verifier", "rollout.law", "rollout.phases")
_DRAFT_TRAINING = ("draft.loss", "draft.unroll", "draft.decay", "draft_optimizer", "distill", "ladder", "logit_chunk")

EXPORT = (*_PROBLEMS, *_NETWORKS, "out")
GENERATE = (
    *(*_PROBLEMS, *_NETWORKS, "hosts", "draft.rollout_dtype"),
    *("rollout.function", "rollout.verifier", "rollout.law", "rollout.phases", *_TURNS),
)
DIAGNOSE = (*_PROBLEMS, *_NETWORKS, "hosts", "rollout.law", "logit_chunk")
# Options that must be the same in launch.diagnose as in the run, because they change its networks or problems. The
# model's files may have moved: the weights come from the run's checkpoint.
SAME_AS_RUN = tuple(
    option
    for option in (*RECIPE_ONLY, *DIAGNOSE)
    if option.partition(".")[0] in ("seed", "data", "model", "lora", "draft")
    and option not in ("model.dtype", "model.path")
)
# data.prompts times rollout.group_size sets the number of sequences in a batch.
EVALUATE = (*GENERATE, "rollout.group_size", "data.prompts", "reward")
DISTILL = (
    *(*_PROBLEMS, *_NETWORKS, *_DRAFT_TRAINING, "hosts", "out", "allow_truncated_law"),
    *("draft.rollout_dtype", *_ROLLOUT, "data.prompts", "eval.prompts", "eval.samples"),
)
COMPARE = (
    *(*_PROBLEMS, *_NETWORKS, *_DRAFT_TRAINING, "hosts", "steps", "cost_table", "microbatches", "reference_every"),
    *("allow_truncated_law", "model.remat", "data.prompts", "reward", "selection", "advantage", "loss", *_ROLLOUT),
    *("model.rollout_dtype", "draft.rollout_dtype", "policy_optimizer", "updates", "draft_training", "warmup"),
    *("asynchronous", "teacher", *_TURNS),
)
TRAIN = ("",)


def reads(patterns: Sequence[str], path: str) -> bool:
    """Return True if `patterns` contains the field at `path` or a section that holds it; "" matches all fields."""
    return any(not pattern or path == pattern or path.startswith(f"{pattern}.") for pattern in patterns)
