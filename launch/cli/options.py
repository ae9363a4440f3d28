"""From a command line to a typed configuration, and from bad input to one line and exit code 2."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from launch.cli.words import refusing, values_of

T = TypeVar("T")

_ALGORITHM = Field(
    "algorithm",
    Literal[tuple(ALGORITHMS)] | None,  # pyright: ignore[reportOperatorIssue]
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
        with refusing():
            recipe = replace(load_recipe(argv[0]), **defaults, **unasked)
    shown, unread = [], {}
    for field in fields_of(RunConfig, recipe):
        if reads(RECIPE_ONLY, field.path):
            unread[field.flag] = f"set {field.path} in a recipe file"
        elif reads(reading, field.path):
            shown.append(field)
        else:
            unread[field.flag] = f"{prog.rpartition(' ')[2]} does not read it"
    programs_own = [_ALGORITHM] if reads(reading, "loss.function") else []
    programs_own += fields_of(own)
    if recipe is None or helping is not None:
        _print_help(helping or "", usage, description, programs_own, by_section(shown))
    values = values_of([*programs_own, *shown], argv[1:], unread)
    name = values.pop("algorithm", None)
    options = _make(own, {field.path: values.pop(field.path) for field in programs_own if field.path in values})
    if name is None:
        with refusing():
            return override(recipe, values), options
    prompts = values.get("data.prompts", recipe.selection.groups or recipe.data.prompts)
    budget = values.get("rollout.max_new_tokens", recipe.rollout.max_new_tokens)
    with refusing():
        config = override(recipe, settings(name, prompts, budget) | values)
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
    return _make(kind, values_of(fields, words, {}))


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    for field in fields_of(kind):
        if field.default is MISSING and field.path not in values:
            raise ConfigError(f"{field.flag} {field.metavar}: must be given. {field.help}")
    with refusing():
        return kind(**values)


def _help_topic(argv: Sequence[str]) -> str | None:
    """Return the section that --help asks for, "" for the overview, None if it is not given."""
    at = next((i for i, word in enumerate(argv) if word in ("-h", "--help")), None)
    return None if at is None else next(iter(argv[at + 1 : at + 2]), "").replace("-", "_")


def _print_help(
    topic: str, usage: str, description: str, own: Sequence[Field], sections: dict[str, list[Field]]
) -> NoReturn:
    print(section_text(topic, sections) if topic else overview(usage, description, own, sections))
    raise SystemExit(0)
