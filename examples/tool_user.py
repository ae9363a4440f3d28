"""Example of an environment: a calculator that goes on with a line of the policy's that ends with "=".

The policy writes "7+5=", which ends its turn, and observes "12". It goes on with "\\n12+9=" and observes "21". A turn
"\\n#21" ends the completion, and its reward. Observed tokens train nothing. docs/turns.md says more.

    python -m launch.train tiny --environment.function examples.tool_user:Calculator --environment.answer-tokens 4 \
        --rollout.stop-strings = --reward.scorer environment --distill.steps 0 --speedup.steps 0
"""

import re
from typing import Any

from launch.environments.answers import Step


class Calculator:
    """Answers the turns of one completion."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        """Begin with a problem: {"prompt", "answer", "columns"}."""
        self._answer = problem["answer"]

    def step(self, turn: str) -> Step:
        """Return the sum that the turn asks for. Another turn ends the completion: 1 for the right answer, else 0."""
        asked = re.search(r"(\d+)\+(\d+)=$", turn)
        if asked is None:
            return Step(reward=float(turn.strip() == f"#{self._answer}"), done=True)
        return Step(str(int(asked[1]) + int(asked[2])))
