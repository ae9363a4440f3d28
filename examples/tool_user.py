"""Example of a tool, and of an environment that asks again after a wrong answer. docs/turns.md says more.

The environment needs no chat template: it answers with text. Its rewards are all that this run has. Tokens of answers
count for the budget of a completion, and train nothing.

    python -m launch.train tiny --environment.function examples.tool_user:AskAgain --environment.answer-tokens 11 \
        --reward.scorer environment --rollout.turns 2 --rollout.max-new-tokens 84 --ladder 94 --speedup.steps 0
    python -m launch.train own_data --model.path DIR --data.train FILE --environment.tools examples.tool_user:calculate
"""

import ast
import operator
from typing import Any

from launch.environments.answers import Step

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as "3 * (4 + 5)".
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"{ast.unparse(node)}: must be numbers with + - * / and parentheses")

    return value(ast.parse(expression.strip(), mode="eval").body)


class AskAgain:
    """Ends a completion at the right answer, for 1 in the first turn and 1/2 later. Repeats the prompt after others."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        """Begin with a problem: {"prompt", "answer", "columns"}, as scorers get it."""
        self._problem, self._wrong = problem, 0

    def step(self, turn: str) -> Step:
        """Answer a turn: the text that the policy wrote."""
        if turn.rpartition("#")[2].strip() == self._problem["answer"]:
            return Step(reward=0.5 if self._wrong else 1.0, done=True)
        self._wrong += 1
        return Step(observation=f"\n{self._problem['prompt']}")
