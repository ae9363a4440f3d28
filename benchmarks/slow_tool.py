"""An environment whose answers take a given time. Imports nothing heavy: processes of episodes load it."""

import time
from typing import Any


class SlowTool:
    """Answers every turn after the seconds that the answer of its problem states."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        self._seconds = float(problem["answer"])

    def step(self, turn: str) -> str:
        time.sleep(self._seconds)
        return "done"
