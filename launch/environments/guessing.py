"""A game in which a letter is guessed, as an environment in text. Imports nothing heavy: episodes' processes load it.

The prompt says between which letters the secret lies. A turn is one guess. The answer to a wrong one says on which side
of it the secret lies, in the form of the prompt, which is two such answers:

prompt       17:b>r<
guess        j
observation  <
guess        f
"""

import random
from typing import Any

from launch.environments.answers import Step

LETTERS = "cdefghijklmnopq"
BELOW, ABOVE = "<", ">"


class TextGuessing:
    """A `TextEnvironment`: an episode ends with reward 1 at the secret, which its seed determines.

    A turn that is none of `LETTERS` ends it without a reward. Binary search finds every secret in four guesses.
    """

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        """Draw the secret."""
        self._secret = random.Random(seed).choice(LETTERS)

    def step(self, turn: str) -> Step:
        """Answer a guess."""
        if len(turn) != 1 or turn not in LETTERS:
            return Step(done=True)
        if turn == self._secret:
            return Step(reward=1.0, done=True)
        return Step(BELOW if self._secret < turn else ABOVE)
