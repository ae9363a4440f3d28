"""A reward of one's own: full marks for the right number, partial credit for one that is near.

Scorers run on the host, in processes that are killed when they hang. They need not import jax. `launch.evaluate` takes
majorities of what `final_answer` returns.

    python -m launch.train tiny --reward.scorer examples.custom_reward:near
    python -m launch.train tiny --reward.scorer exact --reward.also examples.custom_reward:near --reward.weights 1 0.3
"""

import re


def final_answer(completion: str) -> str | None:
    """Return the last number of the completion, None without one."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    return numbers[-1] if numbers else None


def near(completion: str, answer: str) -> float:
    """Return 1 for the answer, and less than 0.5, which does not count as correct, the further off it is."""
    given = final_answer(completion)
    if given is None:
        return 0.0
    distance = abs(float(given) - float(answer))
    return 1.0 if distance == 0 else 0.5 / (1 + distance)
