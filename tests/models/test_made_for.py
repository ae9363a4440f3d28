"""What is stated of a draft beside it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from models.files import read_json, write_json
from models.made_for import MadeFor, read_made_for, state_made_for

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
    ("fields", "message"),
    [
        ({"policy": "p"}, "must have policy, hidden_size, num_layers, temperature, .* and nothing else"),
        (asdict(MADE_FOR) | {"predicted_acceptance": "much"}, "predicted_acceptance = much: must be a number"),
        (asdict(MADE_FOR) | {"temperature": [1]}, r"temperature = \[1\]: must be a number"),
    ],
)
def test_what_is_none(tmp_path: Path, fields: dict, message: str):
    write_json(tmp_path / "made_for.json", fields)
    with pytest.raises(ValueError, match=f"^.*/made_for.json: {message}$"):
        read_made_for(tmp_path)
