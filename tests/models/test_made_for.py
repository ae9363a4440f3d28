"""The file beside a draft that states which policy it was made for."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.files import read_json, write_json

MADE_FOR = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)


def test_what_is_stated_is_read(tmp_path: Path):
    assert read_made_for(tmp_path) is None
    state_made_for(tmp_path, None)
    assert not any(tmp_path.iterdir())
    for stated in (MADE_FOR, replace(MADE_FOR, policy=None, predicted_acceptance=None)):
        state_made_for(tmp_path, stated)
        assert read_made_for(tmp_path) == stated
    assert read_json(tmp_path / "made_for.json") == asdict(stated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 8}, "must have policy, hidden_size, num_layers, temperature, .* and nothing else"),
        ({"policy": 1}, "policy = 1: must be text or null"),
        ({"hidden_size": "16"}, 'hidden_size = "16": must be a positive integer'),
        ({"num_layers": 0}, "num_layers = 0: must be a positive integer"),
        ({"temperature": None}, "temperature = null: must be a finite number"),
        ({"temperature": True}, "temperature = true: must be a finite number"),
        ({"temperature": -0.5}, "temperature = -0.5: must be a finite number of at least 0"),
        ({"temperature": float("inf")}, "temperature = Infinity: must be a finite number"),
        ({"predicted_acceptance": "much"}, 'predicted_acceptance = "much": must be null or a number'),
        ({"predicted_acceptance": 1.5}, "predicted_acceptance = 1.5: must be null or a number within 0 .. 1"),
        ({"predicted_acceptance": float("nan")}, "predicted_acceptance = NaN: must be null or a number"),
    ],
)
def test_what_is_none(tmp_path: Path, changes: dict, message: str):
    write_json(tmp_path / "made_for.json", asdict(MADE_FOR) | changes)
    with pytest.raises(ValueError, match=f"^.*/made_for.json: {message}"):
        read_made_for(tmp_path)
