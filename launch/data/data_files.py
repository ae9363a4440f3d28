"""Files of problems that a path, a folder or a data set on the hub stands for.

A path is never a pattern or an address: brackets, stars and `::` in it stand for themselves.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from launch.console import console
from launch.data.hub import DATA_FILES, HubName, data_file_ending, fetch, hub_name, known_files
from launch.errors import ConfigError, one_line
from models.files import optional

# README.md is not trusted: it may name any file.
_NEVER_FETCHED = ("*.py", "*.pyc", "*.so", "*.sh", "*.pkl", "*.pickle", "*.pt", "*.pth", "*.bin", "*.npy", "*.npz")
# One file of several that hold a split.
_SHARD = re.compile(r"(?P<name>(?:.*\D)?)(?P<number>\d+)[-_]of[-_](?P<count>\d+).*")
_NO_RECORDS = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
_NO_RECORDS += ("license.txt", "readme.txt", "requirements.txt")
# Endings of files that may hold records, but are not read.
_UNREAD = (".arrow", ".avro", ".bz2", ".feather", ".gz", ".h5", ".lz4", ".ndjson", ".npy", ".npz", ".orc", ".pkl")
_UNREAD += (".tar", ".tgz", ".tsv", ".txt", ".xls", ".xlsx", ".xz", ".zip", ".zst")
# Words for the usual splits in names of files and folders, as the library `datasets` reads them.
_SPLITS = {"train": "train", "training": "train"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")


def data_files(option: str, path: str | Path, split: str) -> Sequence[str | Path]:
    """Return the files to read for a path: itself, a folder's files, or the files of a split on the hub.

    A folder holds the files of one split, in one format. The files of a data set are fetched. Raises ConfigError,
    naming the option, if files are missing or cannot be told apart. A single file is not checked.

    split: split to read if a data set's name gives none.
    """
    name = hub_name(str(path), "dataset")
    if name is not None:
        return _data_set(option, replace(name, split=name.split or split))
    return _folder(option, Path(path)) if os.path.isdir(path) else [path]


def _folder(option: str, folder: Path) -> list[Path]:
    """Return the data files of a folder and its subfolders, by name. Raises ConfigError unless they are one split."""
    files = [name for name in _files_below(option, folder) if _may_hold_records(name)]
    names = [name for name in files if data_file_ending(name)]
    if unread := next((name for name in files if name not in names), None):
        raise ConfigError(
            f"{option} = {folder}: {unread} cannot be read; must be a folder of {', '.join(DATA_FILES)} files, or name "
            "the files themselves"
        )
    kinds: dict[object, str] = {}
    for name in names:
        kinds.setdefault((frozenset(_SPLITS.keys() & _words(name)), data_file_ending(name)), name)
    if len(kinds) != 1:
        found = f"{' and '.join([*kinds.values()][:3])}, which are not of one split and format"
        raise ConfigError(
            f"{option} = {folder}: holds {found if kinds else 'no data file'}; must be files, or a folder of "
            f"{', '.join(DATA_FILES)} files of one kind"
        )
    _check_shards(f"{option} = {folder}", names, "add the others, or name the files themselves")
    console.print(f"{option} = {folder}: {len(names)} file{'s' * (len(names) > 1)}")
    return [folder / name for name in names]


def _may_hold_records(name: str) -> bool:
    """Return whether a file is a data file by its name, also one that is not read, and not hidden."""
    *_, last = parts = name.split("/")
    hidden = any(part.startswith(".") for part in parts)
    return last.lower().endswith((*DATA_FILES, *_UNREAD)) and last.lower() not in _NO_RECORDS and not hidden


def _files_below(option: str, folder: Path) -> list[str]:
    """Return the files in a folder and its subfolders, relative to it, in order, but not of hidden subfolders.

    Follows links, but enters each folder once. A broken link is returned too, so that reading it names it.
    """
    found, entered, waiting, links = list[str](), set[Path](), [folder], list[Path]()
    while waiting or links:
        # Linked folders come last, by name: files have the names that they have without links, if there are such.
        directory = waiting.pop() if waiting else heappop(links)
        if (real := directory.resolve()) in entered:
            continue
        entered.add(real)
        try:
            paths = [*directory.iterdir()]
        except OSError as error:
            raise ConfigError(f"{option} = {directory}: cannot be read: {error.strerror}") from None
        for path in paths:
            if not path.is_dir():
                if path.is_file() or path.is_symlink():
                    found.append(path.relative_to(folder).as_posix())
            elif path.is_symlink() and not path.name.startswith("."):
                heappush(links, path)
            elif not path.name.startswith("."):
                waiting.append(path)
    return sorted(found)


def _check_shards(owner: str, files: Sequence[str], remedy: str) -> None:
    """Raise ConfigError if files named NAME-00000-of-00005 are fewer than their names say."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, files)):
        numbers.setdefault((match["name"], match["count"]), set()).add(int(match["number"]))
    for (name, count), found in numbers.items():
        if len(found) < int(count):
            reason = f"has {len(found)} of the {int(count)} files {name}*-of-{count}"
            raise ConfigError(f"{owner}: {reason}; must have all: {remedy}")


def _data_set(option: str, name: HubName) -> list[Path]:
    """Return the files of a split. Fetches only these if README.md lists them, else all data files."""
    commit = fetch(option, name, ("README.md",)).name
    name = replace(name, revision=commit)
    subset_and_patterns = _stated_files(option, name)
    if subset_and_patterns is None:
        directory = fetch(option, name, ("README.md", *(f"*{ending}" for ending in DATA_FILES)))
        unread = [path for path in known_files(name) if not data_file_ending(path)]
        fetched = _files_below(option, directory) if directory.is_dir() else []  # none if no file matches
        files = _files_by_name(option, name, [*fetched, *unread])
    else:
        subset, patterns = subset_and_patterns
        directory = fetch(option, name, patterns, _NEVER_FETCHED)
        paths = _files_below(option, directory)
        chosen = {pattern: _matching(paths, pattern) for pattern in patterns}
        if missing := [pattern for pattern, found in chosen.items() if not found]:
            raise ConfigError(
                f"{option} = {name}: README.md lists {', '.join(missing)}, but no file matches; `{name.command}` "
                "fetches all files"
            )
        files = sorted(set().union(*chosen.values()))
        name = replace(name, subset=subset)
    _check_shards(f"{option} = {name}", files, f"with network, `{name.command}` fetches the others")
    if unknown := next((file for file in files if not data_file_ending(file)), None):
        raise ConfigError(f"{option} = {name}: {unknown}: must end in {', '.join(DATA_FILES)}")
    console.print(f"{option} = {name}")
    return [directory / file for file in files]


def _matching(paths: Sequence[str], pattern: str) -> list[str]:
    return [*optional("huggingface_hub.utils").filter_repo_objects(paths, allow_patterns=pattern)]


def _files_by_name(option: str, name: HubName, paths: Sequence[str]) -> list[str]:
    """Return the data files of a split, which their names and folders tell. Without any, all are of split train.

    Prints which files of the split, or of none, cannot be read.
    """
    files = {path: _words(path) for path in paths if _may_hold_records(path)}
    readable = [path for path in files if data_file_ending(path)]
    split = _SPLITS.get(str(name.split), name.split)
    all_train = split == "train" and not any(_SPLITS.keys() & files[path] for path in readable)
    chosen = [path for path in readable if all_train or split in files[path]]
    if not chosen:
        raise ConfigError(
            f"{option} = {name}: has no split {name.split} in {', '.join(DATA_FILES)} files; it has "
            f"{', '.join(files)[:200] or 'no data files'}"
        )
    unread = [path for path in files if path not in readable]
    if left_out := [path for path in unread if split in files[path] or not _SPLITS.keys() & files[path]]:
        console.print(f"{option} = {name}: left out, because they cannot be read: {', '.join(left_out)[:200]}")
    return chosen


def _words(path: str) -> set[str]:
    """Return the words of a path. Other words for a split become its usual name."""
    return {_SPLITS.get(word, word) for word in re.split("[^a-z]+", path.lower())}


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
        raise ConfigError(f"{option} = {name}: malformed `configs` in README.md: {message_of(error)}") from error
    subset = name.subset or next(iter([*defaults, *({"default"} & subsets.keys()), *subsets]), None)
    if not subsets or subset is None:
        if name.subset not in (None, "default"):
            raise ConfigError(f"{option} = {name}: no subset {subset}; README.md lists none")
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


def message_of(error: Exception) -> str:
    """Return the message of an error on one line; the name of its type if it has none."""
    return one_line(error, 200) or type(error).__name__
