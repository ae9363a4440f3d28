"""From a command line to a typed configuration, and from bad input to one line and exit code 2."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from rich.text import Text
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from configs.schema import RunConfig
from launch.cli.errors import ConfigError, RunStopped
from specjax.verify import VERIFIERS, Verifier, VerifierName

RECIPES = Path(__file__).parents[2] / "configs"

T = TypeVar("T")

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _verifier_by_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """A verifier of one's own is for Python alone: the command line offers those that have a name."""
    if info.type != VerifierName | Verifier:
        return None
    names = tuple(VERIFIERS)
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: value in names,
        str_from_instance=lambda name: [name],
        choices=names,
    )


class Numbers(tuple[int, ...]):
    """Integers that a command line may also separate by commas: `0,3,5`."""


@_REGISTRY.primitive_rule
def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Numbers] | None:
    if info.type is not Numbers:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="INT,INT,...",
        instance_from_str=lambda words: Numbers(int(number) for word in words for number in word.split(",")),
        is_instance=lambda value: isinstance(value, Numbers),
        str_from_instance=lambda numbers: [",".join(map(str, numbers))],
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


def recipes() -> list[str]:
    """The names that CONFIG may be."""
    return sorted(path.stem for path in RECIPES.glob("[a-z]*.py"))


def load_recipe(name: str) -> RunConfig:
    """The `config` of a file in configs/, by its name, or of any such file, by its path.

    Raises ConfigError where there is no such file, it fails, or its `config` is no RunConfig.
    """
    path = RECIPES / f"{name}.py" if name in recipes() else Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"CONFIG = {name}: must be {_choices()}")
    try:
        config = runpy.run_path(str(path)).get("config")
    except Exception as error:
        raise ConfigError(f"CONFIG = {name}: {type(error).__name__}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"CONFIG = {name}: must define `config`, a RunConfig")
    return config


@dataclass(frozen=True)
class NoOptions:
    """A program that has no options beside the recipe's."""


def parse_run(argv: Sequence[str], prog: str, description: str) -> RunConfig:
    """The recipe that argv[0] names, changed by the options behind it: `CONFIG [--section.field VALUE ...]`.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    return parse_run_and(NoOptions, argv, prog, description)[0]


def parse_run_and(
    own: type[T], argv: Sequence[str], prog: str, description: str, *, trains: bool = True, **defaults: Any
) -> tuple[RunConfig, T]:
    """As `parse_run`, for a program with options of its own, the fields of the dataclass `own`.

    trains:   where False, any law of the rollout will do.
    defaults: fields of the recipe that are others for this program, unless the command line says so.
    """
    # Nameless, so that the options of both stand side by side without a prefix.
    nameless = tyro.conf.arg(name="")
    fields: list[Any] = [("own", Annotated[own, nameless]), ("recipe", Annotated[RunConfig, nameless])]
    description = f"{description}\n\nCONFIG is {_choices()}."
    if argv and argv[0] in ("-h", "--help"):
        parse(dataclasses.make_dataclass("Arguments", fields), argv, f"{prog} CONFIG", description)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"CONFIG must come first: {_choices()}")
    try:
        recipe = replace(load_recipe(argv[0]), **defaults, **({} if trains else {"allow_truncated_law": True}))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fields[1] += (dataclasses.field(default=recipe),)
    # A flag by itself; to tyro, with FlagConversionOff, every boolean takes a value.
    options = list(argv[1:])
    if "--resume" in options and options[options.index("--resume") + 1 :][:1] not in (["True"], ["False"]):
        options.insert(options.index("--resume") + 1, "True")
    arguments: Any = parse(dataclasses.make_dataclass("Arguments", fields), options, f"{prog} {argv[0]}", description)
    return arguments.recipe, arguments.own


def parse(kind: type[T], argv: Sequence[str], prog: str, description: str | None = None) -> T:
    """A dataclass from the options of a command line.

    Booleans take True or False, and no field becomes a subcommand. Raises ConfigError for bad input; --help raises
    SystemExit(0).
    """
    markers = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands, tyro.conf.PositionalMetavarFromFieldName)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, args=argv, prog=prog, description=description, config=markers, registry=_REGISTRY)
    except ValueError as error:  # of a `__post_init__` outside any section
        raise ConfigError(str(error)) from error
    except SystemExit as end:
        if not end.code:
            raise
    raise ConfigError(_one_line(box.getvalue(), kind.__name__))


def _choices() -> str:
    return f"one of {', '.join(recipes())}, or a path to such a .py file"


def _one_line(box: str, root: str) -> str:
    """What a box of tyro's says, without the frame and the help text; in tyro's words where it says something new."""
    plain = Text.from_ansi(box).plain
    rows = re.findall(r"^[│|](.*)[│|]$", plain, re.MULTILINE)
    parts = re.split(r"\n *[─-]+ *\n", "\n".join(rows) or plain)
    # Where the terminal has no characters to frame a box with, its title is a part of its own.
    first, *rest = parts[1:] if len(parts) > 1 and not rows else parts
    message, hints = " ".join(first.split()), [row.strip() for part in rest for row in part.splitlines()]
    if invalid := re.match(r"Error parsing (\S+): (.*?)(?: Got errors:.*)?$", message):
        name, reason = invalid.groups()
        if name.startswith("--"):
            usage = [hint.removeprefix(name).strip() for hint in hints if hint.startswith(f"{name} ")]
            return f"{name}: {reason}{''.join(f' (expected {kind})' for kind in usage)}"
        # A section, whose message starts with the field.
        section = re.sub(rf"^({root}|recipe|own)(\.|$)", "", name).replace("-", "_")
        return f"{section}.{reason}" if section else reason
    if unknown := re.match(r"Unrecognized options: (--[^\s,]+)", message):
        names = [hint.split()[0] for hint in hints if hint.startswith("--")]
        closest = difflib.get_close_matches(unknown[1], names, n=1, cutoff=0)
        return message + "".join(f"; did you mean {name}?" for name in closest)
    return message
