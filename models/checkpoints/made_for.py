"""`made_for.json`: which policy a draft was made for, in a file that loaders of any format ignore."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models.files import errors_name, json_text, read_json, write_atomically
from models.json_fields import integer, show

_FILE = "made_for.json"


@dataclass(frozen=True)
class MadeFor:
    """Policy that a draft was made for, and its acceptance there; no array's shape says either.

    policy:               the directory of the policy, or of the run that has it.
    hidden_size:          of the policy. num_layers: of the policy.
    temperature:          that of the law under which the acceptance holds.
    predicted_acceptance: the mean of sum_v min(p, q) over answers of the policy, to held-out prompts, or of a draft
                          that a run has trained, over the rollouts of its last step; None where it is not known.
    """

    policy: str | None
    hidden_size: int
    num_layers: int
    temperature: float
    predicted_acceptance: float | None


def state_made_for(directory: Path, made_for: MadeFor | None) -> None:
    """Put it beside a draft of any format that lies in a directory; None states nothing."""
    if made_for is not None:
        write_atomically(directory / _FILE, json_text(asdict(made_for)))


def read_made_for(directory: Path) -> MadeFor | None:
    """Return the statement of the draft in a directory, None without one. Raises ValueError if it is broken."""
    path = directory / _FILE
    if not path.exists():
        return None
    stated = read_json(path)
    with errors_name(path):
        names = [field.name for field in fields(MadeFor)]
        if stated.keys() != set(names):
            raise ValueError(f"must have {', '.join(names)} and nothing else")
        policy, predicted = stated["policy"], stated["predicted_acceptance"]
        if not isinstance(policy, str | None):
            raise ValueError(f"policy = {show(policy)}: must be text or null")
        for name in ("hidden_size", "num_layers"):
            integer(stated, name)
        if not _within(stated["temperature"], sys.float_info.max):
            raise ValueError(f"temperature = {show(stated['temperature'])}: must be a finite number of at least 0")
        if predicted is not None and not _within(predicted, 1.0):
            raise ValueError(f"predicted_acceptance = {show(predicted)}: must be null or a number within 0 .. 1")
    return MadeFor(**stated)


def _within(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
