"""Names on the Hugging Face hub, and downloads of their files into the hub's cache.

    checkpoint    org/name[@revision]
    data set      org/name[@revision][:[subset/]split]

An existing local path takes precedence over a name. Only tensors, JSON files, tokenizer files and data files are
fetched, never code or pickles.
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from launch.console import console
from launch.errors import ConfigError
from launch.phases.progress import LOG_EVERY_S
from launch.phases.signals import StopSignals
from models.files import optional

Kind = Literal["model", "dataset"]

_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"[^/:@]+(?:/[^/:@]+)*"
_NAMES = {
    "model": re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"),
    "dataset": re.compile(
        rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?(?::(?:(?P<subset>[^/:@]+)/)?(?P<split>[^/:@]+))?"
    ),
}
# Endings of files of problems, in any case. A path with one of them is a file, even if it does not exist.
DATA_FILES = (".csv", ".csv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet")
# Files of a tokenizer, which a checkpoint holds beside its weights: all that transformers reads or writes with one.
TOKENIZER_FILES = (
    *("*.jinja", "additional_chat_templates/*.jinja", "chat_template.json"),
    *("*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.codes", "merges.txt", "vocab*.txt", "vocab*.json"),
    *("tokenizer*.json", "tekken.json", "added_tokens.json", "special_tokens_map.json", "normalizer.json"),
    *("generation_config.json", "processor_config.json", "preprocessor_config.json"),
)
# Files of a checkpoint. In these patterns a star matches slashes too. consolidated*: a second copy of the same weights.
CHECKPOINT_FILES = ("*.safetensors", "*.json", *TOKENIZER_FILES)
# Of folders, only additional_chat_templates is fetched: these are the folders that do not begin with "add".
_NOT_FETCHED = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*")


@dataclass(frozen=True)
class HubName:
    """A name on the hub: a repository, and for a data set its subset and split. None: not given."""

    kind: Kind
    repo: str
    revision: str | None = None
    subset: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        subset = "" if self.subset is None else f"{self.subset}/"
        return f"{self.repo}{revision}" + ("" if self.split is None else f":{subset}{self.split}")

    @property
    def command(self) -> str:
        """Return the command that fetches the repository into the hub's cache."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.repo}{kind}" + ("" if self.revision is None else f" --revision {self.revision}")


def hub_name(path: str, kind: Kind) -> HubName | None:
    """Return the hub name in an option's value; None if a local path exists, or if the value has no name's form."""
    match = _NAMES[kind].fullmatch(path)
    if match is None or os.path.lexists(path) or data_file_ending(path):
        return None
    return HubName(kind, **match.groupdict())


def data_file_ending(path: str) -> str:
    """Return the ending of a file of problems, in lower case; "" if the path has none of them."""
    return next((ending for ending in DATA_FILES if path.lower().endswith(ending)), "")


def checkpoint_directory(option: str, path: str | Path) -> Path:
    """Return the local directory of a checkpoint. A checkpoint on the hub is fetched into the hub's cache first.

    Raises ConfigError, naming the option, if it cannot be fetched. A local directory is not checked.
    """
    name = hub_name(str(path), "model")
    return Path(path) if name is None else fetch(option, name, CHECKPOINT_FILES, _NOT_FETCHED)


def with_commit(path: str, kind: Kind) -> str:
    """Return the name of a checkpoint or data set, with its revision replaced by the commit that it now points to.

    Offline, that is the newest commit in the cache. Local paths and unknown names are returned unchanged.
    """
    name = hub_name(path, kind)
    if name is None:
        return path
    try:
        hub = _library()
    except ImportError:  # reported when the files are read
        return path
    try:
        with _shown(name, []):
            revision = hub.HfApi().resolve_revision(name.repo, repo_type=kind, revision=name.revision)
        return str(replace(name, revision=revision.resolved))
    except Exception:  # the hub's library raises many types
        return str(replace(name, revision=_cached_commit(hub, name) or name.revision))


def _cached_commit(hub: Any, name: HubName) -> str | None:
    """Return the commit that is used offline, the newest in the cache; None if the cache has none."""
    try:
        return Path(
            hub.snapshot_download(name.repo, repo_type=name.kind, revision=name.revision, local_files_only=True)
        ).name
    except Exception:  # many types; reported when the files are read
        return None


@cache
def fetch(option: str, name: HubName, files: tuple[str, ...], ignored: tuple[str, ...] = ()) -> Path:
    """Return the directory in the hub's cache that holds the files matching the patterns. Missing ones are fetched.

    Raises ConfigError, naming the option, if they cannot be fetched.
    """
    try:
        hub = _library()
    except ImportError as error:
        raise ConfigError(f"{option} = {name}: no such file or directory; for a name on the hub, {error}") from None
    arguments: dict[str, Any] = dict(repo_type=name.kind, revision=name.revision)
    arguments |= dict(allow_patterns=list(files), ignore_patterns=list(ignored))
    bars: list[Any] = []
    try:
        with _shown(name, bars):
            return Path(hub.snapshot_download(name.repo, **arguments, tqdm_class=_progress_bar(name, bars)))
    except Exception as error:  # from the hub's library, its HTTP client or the disk
        raise ConfigError(f"{option} = {name}: {_reason(name, error)}") from error


def known_files(name: HubName) -> list[str]:
    """Return the files of a repository at the revision that was fetched; none if the cache has no list of them."""
    try:
        files = _library().get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.revision)
    except Exception:  # many types, and old versions of the library have no such function; the list serves a message
        return []
    return [file.path for file in files]


@contextmanager
def _shown(name: HubName, bars: list[Any]) -> Iterator[None]:
    """Print a line every LOG_EVERY_S if there is no terminal to show a bar on. A signal ends the process at once.

    bars: the bar for the bytes of all files, if it exists already.
    """
    start, ended = time.monotonic(), threading.Event()

    def show() -> None:
        while not ended.wait(LOG_EVERY_S):
            size = "".join(f", {bar.n / 1e6:,.0f} of {(bar.total or 0) / 1e6:,.0f} MB" for bar in bars)
            console.print(f"fetching {name}{size}, {time.monotonic() - start:.0f} s")

    if not console.is_terminal:
        threading.Thread(target=show, daemon=True).start()
    # The library's threads would fetch all files before they let the process end.
    ending = f"stopped fetching {name}; the files that are complete stay in the hub's cache"
    try:
        with StopSignals(console.print, ending):
            yield
    finally:
        ended.set()


def _library() -> Any:
    """Import the hub's library and silence its warnings: what they say is also raised, or intended (an old cache)."""
    optional("huggingface_hub.utils").logging.set_verbosity_error()
    return optional("huggingface_hub")


def _progress_bar(name: HubName, bars: list[Any]) -> Any:
    """Return a progress bar class for the library. Only the bar for the bytes of all files is shown, until it ends.

    bars: gets that bar, which counts also where it is not shown.
    """

    class Bar(optional("huggingface_hub.utils").tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            of_bytes = options.get("name") == "huggingface_hub.snapshot_download"
            visible = of_bytes and console.is_terminal
            changed = {"desc": f"fetching {name}", "leave": False} if visible else {"disable": True}
            super().__init__(*args, **options | changed)
            bars.extend([self] * of_bytes)

        def update(self, n: float | None = 1) -> Any:
            if self.disable:
                self.n += n or 0
            return super().update(n)

    return Bar


def _reason(name: HubName, error: Exception) -> str:
    """Return the end of an error message: what is wrong and what to do about it."""
    errors = optional("huggingface_hub.errors")
    kind = "model" if name.kind == "model" else "data set"
    status = _status(error)
    if status == 429:
        return "the hub answers 429, too many requests; wait some minutes, or `hf auth login` for a higher limit"
    if status >= 500:
        return f"the hub answers {status}, an error of its own; `{name.command}` tries again"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"no such file or directory, and the hub cannot be reached; with network, `{name.command}` fetches the "
            f"{kind} into the cache"
        )
    if isinstance(error, errors.GatedRepoError):
        return f"the {kind} is gated; accept its terms on its page, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such file or directory, and the hub shows no such {kind}; `hf auth login` if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the {kind} has no revision {name.revision}; must be a branch, a tag or a commit"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"cannot be fetched: {reason}; `{name.command}` tries again"


def _status(error: BaseException | None) -> int:
    """Return the HTTP status of the answer that caused the error; 0 if there was no answer."""
    while error is not None and getattr(error, "response", None) is None:
        error = error.__cause__ or error.__context__
    return getattr(getattr(error, "response", None), "status_code", 0)
