"""Files of a tokenizer and of its stops, in a model's directory."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.data.hub import TOKENIZER_FILES
from launch.errors import ConfigError, as_config_error, first_line
from models.files import check_file, read_json, write_json


def load_tokenizer(directory: Path) -> Any:
    """Load the Hugging Face tokenizer of a directory. Raises ConfigError with one line if that fails."""
    if not directory.is_dir():
        raise ConfigError(f"model.path = {directory}: no such directory")
    with as_config_error():
        _tokenizer_files(directory)
        if (directory / "config.json").exists():
            check_file(directory / "config.json")
    # Silence the advice to install PyTorch: we use only the tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"model.path = {directory}: its tokenizer needs transformers: pip install -e '.[hf]' in a clone"
        ) from None
    try:
        # Without trust_remote_code, transformers may ask on stdin whether to run the model's own code.
        with refusing_panics(directory):
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many types
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.path = {directory}: its tokenizer needs code of its own (auto_map in tokenizer_config.json), "
                "which is never run; must be a tokenizer that transformers has"
            ) from None
        if not (directory / "tokenizer.json").exists():
            # The first line of transformers' error announces a list, and the list names classes, not files.
            raise ConfigError(
                f"model.path = {directory}: cannot load a tokenizer from it; must hold a tokenizer.json, or the files "
                "of another tokenizer that transformers loads"
            ) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path = {directory}: cannot load a tokenizer from it: {reason}") from error


@contextmanager
def refusing_panics(directory: str | Path) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a ConfigError. Patterns may cause one."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it cannot be imported
            raise
        raise ConfigError(
            f"model.path = {directory}: its tokenizer fails: {first_line(error)}; must have a tokenizer.json whose "
            "patterns fit the text"
        ) from None


def listed_stop_tokens(tokenizer: Any, directory: Path) -> tuple[int, ...]:
    """Return the ids that end a completion: first the tokenizer's, then those in the model's files."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for path in (directory / "generation_config.json", directory / "config.json"):
        ids += _stops_in(path)
    return tuple(dict.fromkeys(ids))


def listed_stop_strings(path: Path) -> tuple[str, ...]:
    """Return the stop strings of a generation_config.json. Raises ConfigError unless they are texts."""
    stops = _field(path, "stop_strings")
    texts = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"model.path = {path.parent}: stop_strings = {stops!r} in {path.name}: must be texts")
    return tuple(dict.fromkeys(texts))


def state_stops(directory: Path, stop_tokens: Sequence[int], stop_strings: Sequence[str]) -> None:
    """Let a model's files name exactly these stops. Files that name them already keep their bytes."""
    generation, config = directory / "generation_config.json", directory / "config.json"
    listed = set(_stops_in(generation)), set(listed_stop_strings(generation))
    if listed != (set(stop_tokens), set(stop_strings)):
        fields = read_json(generation) if generation.exists() else {}
        fields.pop("stop_strings", None)
        strings = {"stop_strings": list(stop_strings)} if stop_strings else {}
        write_json(generation, fields | {"eos_token_id": list(stop_tokens)} | strings)
    if not set(_stops_in(config)) <= set(stop_tokens):
        write_json(config, read_json(config) | {"eos_token_id": list(stop_tokens)})


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files that `source` holds to `out`."""
    for path in _tokenizer_files(source):
        copy = out / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _stops_in(path: Path) -> list[int]:
    eos = _field(path, "eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"model.path = {path.parent}: eos_token_id = {eos!r} in {path.name}: must be token ids")
    return ids


def _field(path: Path, name: str) -> Any:
    """Return a field of a model's JSON file; None without it."""
    try:
        return read_json(path).get(name) if path.exists() else None
    except ValueError as error:
        raise ConfigError(f"model.path = {path.parent}: {error}") from None


def _tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a directory that match TOKENIZER_FILES. Raises ValueError unless all are regular files."""
    paths = sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)})
    for path in paths:
        check_file(path)
    return paths
