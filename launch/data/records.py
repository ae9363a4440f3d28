"""Records of problems: JSON, JSONL, CSV and parquet files, and data sets on the hub."""

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.cli.console import console
from launch.cli.errors import ConfigError
from launch.data.hub import HubName, fetch, hub_name
from launch.data.json_lines import read_lines, read_text
from models.files import optional

Records = Iterator[tuple[dict[str, Any], str]]
# Fetched if a data set's README.md does not say which files hold which split.
_DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv")
# README.md is not trusted: it may name any file.
_NEVER_FETCHED = ("*.py", "*.pyc", "*.so", "*.sh", "*.pkl", "*.pickle", "*.pt", "*.pth", "*.bin", "*.npy", "*.npz")


def read_records(option: str, path: str | Path, split: str) -> Records:
    """Yield (record, place) for each record of a file or of a data set on the hub. The place is for error messages.

    The format follows from the file's name: .csv, .parquet, and JSON otherwise (an array of objects, or one object per
    line). Raises ConfigError, naming the option or the place, if the records cannot be read.

    split: split to read if the data set's name gives none.
    """
    name = hub_name(str(path), "dataset")
    if name is not None:
        return _data_set(option, replace(name, split=name.split or split))
    suffix = Path(path).suffix
    if suffix == ".csv":
        return _csv(path)
    if suffix == ".parquet":
        if not Path(path).is_file():
            raise ConfigError(f"{path}: cannot be read: no such file")
        return _rows(str(path), "parquet", str(path), "train")
    return read_lines(path)


def _csv(path: str | Path) -> Records:
    """Yield the rows below the header, by column."""
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True, restval="")
    try:
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row:
                raise ConfigError(f"{where}: has more columns than the header")
            yield row, where
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from None


def _data_set(option: str, name: HubName) -> Records:
    """Yield the rows of a split. Fetches only its own files if README.md lists them, else all data files."""
    commit = fetch(option, name, ("README.md",)).name
    name = replace(name, revision=commit)
    subset_and_patterns = _stated_files(option, name)
    assert name.split is not None
    if subset_and_patterns is None:
        directory = fetch(option, name, ("README.md", *_DATA_FILES))
        console.print(f"{option} = {name}")
        yield from _rows(f"{option} = {name}", str(directory), None, name.split, name.subset)
        return
    subset, patterns = subset_and_patterns
    directory = fetch(option, name, patterns, _NEVER_FETCHED)
    paths = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    files = sorted(optional("huggingface_hub.utils").filter_repo_objects(paths, allow_patterns=list(patterns)))
    if not files:
        raise ConfigError(f"{option} = {name}: README.md lists {', '.join(patterns)}, but no file matches")
    split, name = name.split, replace(name, subset=subset)
    console.print(f"{option} = {name}")
    yield from _rows(f"{option} = {name}", str(directory), {split: files}, split)


def _stated_files(option: str, name: HubName) -> tuple[str, tuple[str, ...]] | None:
    """Return (subset, patterns of the split's files) from README.md; None if it does not list them.

    If the name has no subset, the default one is used, or else the first. Raises ConfigError for an unknown subset or
    split, and if README.md is malformed.
    """
    readme = fetch(option, name, ("README.md",)) / "README.md"
    try:
        fields = optional("huggingface_hub").metadata_load(readme) if readme.is_file() else None
        subsets = {each["config_name"]: _splits(each.get("data_files")) for each in (fields or {}).get("configs", ())}
        defaults = [each["config_name"] for each in (fields or {}).get("configs", ()) if each.get("default")]
    except Exception as error:  # the file may hold anything
        raise ConfigError(f"{option} = {name}: malformed `configs` in README.md: {_one_line(error)}") from error
    subset = name.subset or next(iter([*defaults, *({"default"} & subsets.keys()), *subsets]), None)
    if not subsets or subset is None:
        return None
    if subset not in subsets:
        raise ConfigError(f"{option} = {name}: no subset {subset}; must be one of {', '.join(subsets)}")
    splits = subsets[subset]
    if splits is None:
        return None
    if name.split not in splits:
        raise ConfigError(f"{option} = {name}: {subset} has no split {name.split}; must be one of {', '.join(splits)}")
    return subset, splits[name.split]


def _splits(files: Any) -> dict[str, tuple[str, ...]] | None:
    """Return the patterns of each split, from the `data_files` of a subset in README.md."""
    if files is None:
        return None
    entries: list[Any] = [files] if isinstance(files, str) else files
    if all(isinstance(entry, str) for entry in entries):
        return {"train": tuple(entries)}
    paths = {entry["split"]: entry["path"] for entry in entries}
    return {split: (path,) if isinstance(path, str) else tuple(path) for split, path in paths.items()}


def _rows(owner: str, source: str, files: Any, split: str, subset: str | None = None) -> Records:
    """Yield rows as the library `datasets` reads them, without a copy in its cache. owner: named in error messages."""
    try:
        datasets = optional("datasets")
    except ImportError as error:
        raise ConfigError(f"{owner}: {error}") from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also raises what it logs
    try:
        rows = datasets.load_dataset(source, subset, data_files=files, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield row, f"{owner}: row {number}"
    except ConfigError:
        raise
    except Exception as error:  # from the reader of any format
        raise ConfigError(f"{owner}: cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
