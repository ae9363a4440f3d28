"""Example of a custom reward: 1 for the right number, partial credit for a number near it.

Scorers run on the host, in processes that are killed if they hang. They need not import jax. `launch.evaluate` takes
majority votes over the results of `final_answer`.

    python -m launch.train tiny --reward.scorer examples.custom_reward:near
    python -m launch.train tiny --reward.scorer exact --reward.also examples.custom_reward:near --reward.weights 1 0.3
"""

import re


def final_answer(completion: str) -> str | None:
    """Return the last number in the completion, or None if it has no number."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    return numbers[-1] if numbers else None


def near(completion: str, answer: str) -> float:
    """Return 1 for the right number, else less than 0.5, falling with the distance. Above 0.5 counts as correct."""
    given = final_answer(completion)
    if given is None:
        return 0.0
    distance = abs(float(given) - float(answer))
    return 1.0 if distance == 0 else 0.5 / (1 + distance)
