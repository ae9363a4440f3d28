"""The share of draft training is the additional time of steps that train the draft."""

from collections.abc import Mapping
from typing import Any

import pytest

from launch.run.draft_share import DraftShare


def test_the_share_is_the_time_that_steps_with_draft_training_take_longer() -> None:
    logged: list[Mapping[str, Any]] = []

    def log(step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        logged.append(metrics)
        return dict(metrics)

    share = DraftShare(log)
    share(1, {"draft/trained": 1, "time/step": 60.0})
    for step in range(2, 18):
        trained = step % 4 == 0
        share(step, {"draft/trained": int(trained), "time/step": 1.5 if trained else 1.0})
    share(18, {"draft/trained": 0, "time/step": 90.0, "time/generation": 80.0})
    # Needs steps of both kinds. The first step, which compiles, and probes do not count.
    assert [metrics["time/draft_training"] for metrics in logged[:3]] == [None] * 3
    trained = 5 / 18
    assert logged[-1]["time/draft_training"] == pytest.approx(trained * 0.5 / (1 + trained * 0.5))
    share(19, {"time/step": 1.0})
    assert "time/draft_training" not in logged[-1]
