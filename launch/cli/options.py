"""From a command line to a typed configuration, and from bad input to one line and exit code 2."""

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import jax

from configs.algorithms import ALGORITHMS, describe, settings
from configs.override import override
from configs.schema import RunConfig
from launch.cli.errors import ConfigError, RunStopped
from launch.cli.fields import Field, fields_of, flag_of, summary
from launch.cli.help import by_section, overview, section_text
from launch.cli.reads import RECIPE_ONLY, TRAIN, reads
from launch.cli.recipes import choices, load_recipe

T = TypeVar("T")

_ALGORITHM = Field(
    "algorithm",
    Literal[tuple(ALGORITHMS)] | None,
    None,
    "Named algorithm: sets advantage, loss and selection. Options given beside it win.",
)


def run_program(main: Callable[[list[str]], int]) -> int:
    """The exit code of `main`, called with the command line's arguments.

    A ConfigError becomes one line on stderr and 2, RunStopped one and 1, Ctrl-C becomes 130. Any other exception is a
    fault of the program and passes.
    """
    try:
        return main(sys.argv[1:])
    except (ConfigError, RunStopped) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def use_compile_cache() -> None:
    """Keep compiled programs in $SPECJAX_CACHE, by default ~/.cache/specjax/jax, unless JAX has a cache already."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        directory = os.environ.get("SPECJAX_CACHE") or Path.home() / ".cache" / "specjax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@dataclass(frozen=True)
class NoOptions:
    """A program that has no options beside the recipe's."""


def parse_run(argv: Sequence[str], prog: str, description: str, reading: Sequence[str] = TRAIN) -> RunConfig:
    """Return the recipe that argv[0] names, changed by the options after it: `CONFIG [--section.field VALUE ...]`.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    return parse_run_and(NoOptions, argv, prog, description, reading)[0]


def parse_run_and(
    own: type[T],
    argv: Sequence[str],
    prog: str,
    description: str,
    reading: Sequence[str] = TRAIN,
    *,
    trains: bool = True,
    **defaults: Any,
) -> tuple[RunConfig, T]:
    """As `parse_run`, for a program with options of its own, the fields of the dataclass `own`.

    reading:  the options of the recipe that the program reads (launch.cli.reads); it has no others.
    trains:   if False, the rollout's law may be truncated.
    defaults: fields of the recipe that have another value in this program unless an option sets them.

    --algorithm, in programs that read the loss, changes the recipe before the options do, and prints what it set.
    """
    usage = f"{prog} CONFIG [--option VALUE ...]"
    description = f"{description}\nCONFIG is {choices()}."
    named, helping = bool(argv) and not argv[0].startswith("-"), _help_topic(argv)
    if not named and helping is None:
        raise ConfigError(f"CONFIG must come first: {choices()}")
    recipe = None
    if named:
        unasked = {} if trains else {"allow_truncated_law": True}
        with _refusing():
            recipe = replace(load_recipe(argv[0]), **defaults, **unasked)
    every = list(fields_of(RunConfig, recipe))
    shown = [field for field in every if reads(reading, field.path) and not reads(RECIPE_ONLY, field.path)]
    programs_own = list(fields_of(own))
    if any(field.path.startswith("loss.") for field in shown):
        programs_own.insert(0, _ALGORITHM)
    if recipe is None or helping is not None:
        _print_help(helping or "", usage, description, programs_own, by_section(shown))
    program, unread = prog.rpartition(" ")[2], {}
    for field in (field for field in every if field not in shown):
        recipe_only = reads(RECIPE_ONLY, field.path)
        unread[field.flag] = f"set {field.path} in a recipe file" if recipe_only else f"{program} does not read it"
    values = _values([*programs_own, *shown], argv[1:], unread)
    name = values.pop("algorithm", None)
    own_values = {field.path: values.pop(field.path) for field in programs_own if field.path in values}
    prompts = values.get("data.prompts", recipe.data.prompts)
    budget = values.get("rollout.max_new_tokens", recipe.rollout.max_new_tokens)
    with _refusing():
        config = override(recipe, values if name is None else settings(name, prompts, budget) | values)
    options = _make(own, own_values)
    if name is not None:
        print(describe(name, config, values))
    return config, options


def parse(
    kind: type[T], argv: Sequence[str], prog: str, description: str | None = None, positional: Sequence[str] = ()
) -> T:
    """Return a dataclass from the options of a command line.

    positional: fields whose values come first, without a flag. Raises ConfigError for bad input; --help raises
    SystemExit(0).
    """
    fields = list(fields_of(kind))
    if _help_topic(argv) is not None:
        usage = " ".join([prog, *(name.upper() for name in positional), "[--option VALUE ...]"])
        text = [f"  {field.path.upper():18}{field.help}" for field in fields if field.path in positional]
        options = [field for field in fields if field.path not in positional]
        _print_help("", usage, "\n".join([description or summary(kind), *text]), options, {})
    words = [*argv]
    for name in positional:
        if not words or words[0].startswith("--"):
            raise ConfigError(f"{name.upper()} must be given: {' '.join([prog, *map(str.upper, positional)])}")
        words = [*words[1:], flag_of(name), words[0]]
    return _make(kind, _values(fields, words, {}))


def _values(fields: Sequence[Field], argv: Sequence[str], unread: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a command line gives, by path. unread: why options that exist elsewhere are unknown."""
    known, given = {field.flag: field for field in fields}, {}
    for flag, words in _split(argv):
        if flag not in known:
            hint = unread.get(flag, "")
            if not hint and (closest := difflib.get_close_matches(flag, known, n=1, cutoff=0.5)):
                hint = f"did you mean {closest[0]}?"
            raise ConfigError(f"{flag}: unknown option{hint and '; ' + hint}")
        try:
            given[known[flag].path] = known[flag].read(words)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return given


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with the words after it. Negative numbers are words."""
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            options.append((flag.replace("_", "-"), [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: unexpected, options begin with --")
    return options


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    for field in fields_of(kind):
        if field.default is MISSING and field.path not in values:
            raise ConfigError(f"{field.flag} {field.metavar}: must be given. {field.help}")
    with _refusing():
        return kind(**values)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn the ValueError of a check into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _help_topic(argv: Sequence[str]) -> str | None:
    """Return the section that --help asks for, "" for the overview, None if it is not given."""
    at = next((i for i, word in enumerate(argv) if word in ("-h", "--help")), None)
    return None if at is None else next(iter(argv[at + 1 : at + 2]), "").replace("-", "_")


def _print_help(
    topic: str, usage: str, description: str, own: Sequence[Field], sections: dict[str, list[Field]]
) -> NoReturn:
    print(section_text(topic, sections) if topic else overview(usage, description, own, sections))
    raise SystemExit(0)
