"""Parser of command lines into typed configurations."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from types import NoneType
from typing import Any, Literal, TypeVar

from configs.algorithms import ALGORITHMS, describe, with_algorithm
from configs.override import override
from configs.schema import DraftConfig, RunConfig, kind_of
from launch.cli.consequences import with_consequences
from launch.cli.effects import without_effect
from launch.cli.fields import Field, fields_of, summary
from launch.cli.help import overview_parser, sections_of, show_help
from launch.cli.microbatches import with_fitting_microbatches
from launch.cli.parser import Parser
from launch.cli.recipe_options import RECIPE_ONLY, TRAIN, reads
from launch.cli.recipes import choices, is_run, load_recipe
from launch.errors import ConfigError, as_config_error
from specjax.train.config import check_groups

T = TypeVar("T")

_ALGORITHM_OPTION = Field(
    "algorithm",
    (Literal[tuple(ALGORITHMS)], NoneType),  # pyright: ignore[reportInvalidTypeForm]
    default=None,
    help="Sets advantage, loss and selection; other options win.",
)


@dataclass(frozen=True)
class NoOptions:
    """Options of a program that has only the recipe's options."""


def parse_run(argv: Sequence[str], prog: str, description: str, reading: Sequence[str] = TRAIN) -> RunConfig:
    """Return the recipe named by argv[0], with the options after it applied: `CONFIG [--section.field VALUE ...]`.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    return parse_run_and(NoOptions, argv, prog, description, reading)[0]


def parse_run_and(
    kind: type[T], argv: Sequence[str], prog: str, description: str, reading: Sequence[str] = TRAIN, **defaults: Any
) -> tuple[RunConfig, T]:
    """Parse as `parse_run` does, for a program that also has its own options: the fields of the dataclass `kind`.

    In programs that read the loss, --algorithm changes the recipe before the other options, and prints what it set.
    Programs that read the advantage refuse groups of one sample if the baseline is the group. A recipe's number of
    microbatches becomes one that divides the batch; one that is given must divide it.

    If CONFIG is the directory of a run, the program reads its checkpoint, unless --checkpoint says otherwise, and
    --resume continues it.

    reading:  the recipe's options that the program reads (launch.cli.recipe_options) and therefore accepts.
    defaults: fields of the recipe that have another default in this program.
    """
    recipe = None
    if argv and not argv[0].startswith("-"):
        with as_config_error():
            recipe = replace(load_recipe(argv[0]), **defaults)
    all_fields = list(fields_of(RunConfig, recipe))
    settable = [field for field in all_fields if reads(reading, field.path) and not reads(RECIPE_ONLY, field.path)]
    programs_own = [_ALGORITHM_OPTION] if reads(reading, "loss.function") else []
    programs_own += fields_of(kind)
    usage = f"{_as_started(prog)} CONFIG [--option VALUE ...]"
    overview = overview_parser(usage, description, programs_own, sections_of(settable))
    elsewhere = {field.flag: _place_of(field, prog) for field in all_fields}
    parser = Parser(parents=[overview])
    for field in settable:
        field.add_to(parser)
    values = parser.read(argv if recipe is None else argv[1:], [*programs_own, *settable], elsewhere)
    if "help" in values:
        draft = values.get("draft.kind", DraftConfig.kind if recipe is None else recipe.draft.kind)
        shown = [field for field in settable if kind_of(draft).reads(field.path)]
        idle = {field.flag for field in settable} - {field.flag for field in shown}
        elsewhere |= dict.fromkeys(idle, f"drafts of kind {draft} do not read it")
        show_help(" ".join(values["help"]), overview, programs_own, shown, all_fields, elsewhere)
        raise SystemExit(0)
    if recipe is None:
        raise ConfigError(f"CONFIG must come first: {choices()}")
    if is_run(argv[0]):
        reads_checkpoint = any(field.path == "checkpoint" for field in programs_own)
        _refuse_other_networks(recipe, values, new_run=not (reads_checkpoint or values.get("resume")))
        if reads_checkpoint:
            values.setdefault("checkpoint", argv[0])
        if values.get("resume"):
            values.setdefault("out", argv[0])
    algorithm = values.pop("algorithm", None)
    for field in programs_own:
        if field.default is MISSING and field.path not in values:
            raise ConfigError(f"{field.flag} {field.metavar}: must be set. {field.help}")
    given, values = values, with_consequences(recipe, values)
    with as_config_error():
        program_values = {field.path: values.pop(field.path) for field in programs_own if field.path in values}
        required = {field.path: program_values.pop(field.path) for field in programs_own if field.default is MISSING}
        options = override(kind(**required), program_values)
        config = override(recipe, values) if algorithm is None else with_algorithm(recipe, algorithm, values)
        if "microbatches" not in values:
            config = with_fitting_microbatches(config)
        if reads(reading, "advantage"):
            check_groups(config)
    if algorithm is not None:
        print(describe(algorithm, config, values))
    for line in without_effect(recipe, config, given, reading):
        print(line)
    return config, options


def _place_of(field: Field, prog: str) -> str:
    """Return where a field that the program does not take is set, or that the program does not read it."""
    if reads(RECIPE_ONLY, field.path):
        return f"set {field.path} in a recipe file"
    return f"{prog.rpartition(' ')[2]} does not read it"


def _refuse_other_networks(run: RunConfig, values: Mapping[str, Any], new_run: bool) -> None:
    """Raise ConfigError if other networks are asked for than those of the run that CONFIG names.

    Options of the run follow from its networks. The files of its model may have moved, which a new run cannot tell from
    another model.
    """
    for name in ("draft.kind", "data.tokenizer", *(["model.path"] if new_run else [])):
        section, _, field = name.partition(".")
        own = getattr(getattr(run, section), field)
        if values.get(name, own) != own:
            raise ConfigError(
                f"{name} = {values[name]}: must be {own}, as in the run; give a recipe as CONFIG for others"
            )


def parse(kind: type[T], argv: Sequence[str], prog: str, description: str | None = None, **defaults: Any) -> T:
    """Return a dataclass from a command line. Fields without a default are positional, the others are options.

    defaults: fields with another value unless an option sets them.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    fields = list(fields_of(kind))
    parser = Parser(prog=_as_started(prog), description=description or summary(kind), add_help=True)
    for field in fields:
        field.add_to(parser, positional=field.default is MISSING)
    with as_config_error():
        return kind(**defaults | parser.read(argv, fields, {}))


def _as_started(prog: str) -> str:
    """Return the words that started a program: `specjax train` (launch.__main__), or `prog`."""
    return sys.argv[0] if sys.argv[0].endswith(f" {prog.rpartition('.')[2]}") else prog
