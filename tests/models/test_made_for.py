"""The file beside a draft that states which policy it was made for."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.files import read_json, write_json
from tests.refusals import refuses

MADE_FOR = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)


def test_made_for_is_read_back(tmp_path: Path):
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
        ({"layers": 8}, "...policy...hidden_size...num_layers...temperature"),
        ({"policy": 1}, "policy = 1:"),
        ({"hidden_size": "16"}, 'hidden_size = "16":'),
        ({"num_layers": 0}, "num_layers = 0:"),
        ({"temperature": None}, "temperature = null:"),
        ({"temperature": True}, "temperature = true:"),
        ({"temperature": -0.5}, "temperature = -0.5:...0"),
        ({"temperature": float("inf")}, "temperature = Infinity:"),
        ({"predicted_acceptance": "much"}, 'predicted_acceptance = "much":'),
        ({"predicted_acceptance": 1.5}, "predicted_acceptance = 1.5:...0...1"),
        ({"predicted_acceptance": float("nan")}, "predicted_acceptance = NaN:"),
    ],
)
def test_an_invalid_made_for_is_refused(tmp_path: Path, changes: dict, message: str):
    write_json(tmp_path / "made_for.json", asdict(MADE_FOR) | changes)
    with refuses(f"/made_for.json: {message}"):
        read_made_for(tmp_path)
