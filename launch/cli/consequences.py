"""Consequences of options where the recipe would stand in the way."""

from collections.abc import Mapping
from typing import Any

from configs.schema import RunConfig
from configs.schema.rewards import NO_REWARD, TRACED

# Learning rate of adapters, as a multiple of that of all weights (Thinking Machines, "LoRA Without Regret", 2025).
LORA_RATE = 10


def with_consequences(recipe: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options, with what follows from them where the recipe would stand in the way.

    - A draft length fixes it, where a recipe chooses among several.
    - Without a draft there is nothing to draft with or to distil.
    - The learning rate of adapters is ten times that of all weights.
    - A scorer within the program compares token ids, and cannot leave thinking out.
    - Without a scorer nothing tells which completions are correct.
    - A teacher's path makes it a network of its own.
    """
    draft, follows = recipe.draft, dict[str, Any]()
    if "rollout.draft_length" in values:
        follows["rollout.draft_lengths"] = ()
    if values.get("draft.kind", draft.kind) == "none":
        follows["distill.steps"] = 0
        if values.get("draft.lookup.kind", draft.lookup.kind) == "none":
            follows |= {"rollout.draft_length": 0, "rollout.draft_lengths": ()}
    lora = bool(values.get("lora.rank", recipe.lora.rank) or values.get("lora.path", recipe.lora.path))
    if lora != recipe.lora.enabled:
        rate = recipe.policy_optimizer.learning_rate * LORA_RATE ** (1 if lora else -1)
        # 1e-06 * 10 is 9.999999999999999e-06.
        follows["policy_optimizer.learning_rate"] = float(f"{rate:.12g}")
    scorer = values.get("reward.scorer", recipe.reward.scorer)
    if scorer in (TRACED, NO_REWARD):
        follows["reward.thinking"] = ()
    if scorer == NO_REWARD:
        follows |= {"eval.every": 0, "selection.groups": 0, "teacher.rewards": False}
    if values.get("teacher.path"):
        follows["teacher.kind"] = "network"
    return follows | dict(values)
