"""`made_for.json`: the policy that a draft or adapters were made for. Loaders of every format ignore the file."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models.files import errors_name, json_text, read_json, write_atomically
from models.json_fields import integer, show

_FILE = "made_for.json"


@dataclass(frozen=True)
class MadeFor:
    """Policy that a draft or adapters were made for, and a draft's acceptance with it. The arrays show neither.

    Attributes:
        policy: Name or directory of the policy, or of the run that contains it.
        hidden_size: Hidden size of the policy.
        num_layers: Number of layers of the policy.
        temperature: Sampling temperature for which the acceptance holds. None without one.
        predicted_acceptance: Mean of sum_v min(p, q) over the policy's answers to held-out prompts or, for a draft
            trained in a run, over the rollouts of the run's last step. None if unknown.
        dtype: Dtype of the policy's weights; of a base in 8 bits int8 or fp8. None if unknown.
        hash: `specjax.checkpoint_integrity.fingerprint` of the weights. None if unknown.
    """

    policy: str | None
    hidden_size: int
    num_layers: int
    temperature: float | None = None
    predicted_acceptance: float | None = None
    dtype: str | None = None
    hash: str | None = None

    def __str__(self) -> str:
        """Return name, dtype and hash, as far as they are known, for messages."""
        known = {"in": self.dtype, "with the hash": self.hash}
        name = "weights without a name" if self.policy is None else show(self.policy)
        return " ".join([name, *(f"{word} {show(value)}" for word, value in known.items() if value)])


def state_made_for(directory: Path, made_for: MadeFor | None) -> None:
    """Write `made_for.json` into the directory of a draft of any format; None writes nothing."""
    if made_for is not None:
        write_atomically(directory / _FILE, json_text(asdict(made_for)))


def read_made_for(directory: Path) -> MadeFor | None:
    """Read `made_for.json` in a draft's directory; None if there is none. Raises ValueError if it is invalid."""
    path = directory / _FILE
    if not path.exists():
        return None
    stored = read_json(path)
    with errors_name(path):
        names = [field.name for field in fields(MadeFor)]
        values: dict[str, Any] = {"dtype": None, "hash": None, **stored}
        if values.keys() != set(names):
            raise ValueError(f"must have the fields {', '.join(names)}, and no others")
        predicted, temperature = values["predicted_acceptance"], values["temperature"]
        for name in ("policy", "dtype", "hash"):
            if not isinstance(values[name], str | None):
                raise ValueError(f"{name} = {show(values[name])}: must be text or null")
        for name in ("hidden_size", "num_layers"):
            integer(values, name)
        if not (_within(temperature, sys.float_info.max) or temperature is predicted is None):
            raise ValueError(f"temperature = {show(temperature)}: must be a finite number of at least 0")
        if predicted is not None and not _within(predicted, 1.0):
            raise ValueError(f"predicted_acceptance = {show(predicted)}: must be null or a number within 0 .. 1")
    return MadeFor(**values)


def _within(value: Any, maximum: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= maximum
