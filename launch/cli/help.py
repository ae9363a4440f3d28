"""Parsers of the sections of a recipe, and the help that they print."""

import argparse
from collections.abc import Mapping, Sequence
from typing import get_type_hints

from configs.schema import RunConfig
from launch.cli.fields import Field, summary
from launch.cli.option_search import matching
from launch.cli.parser import Parser
from launch.cli.recipes import choices
from launch.errors import ConfigError


def show_help(
    topic: str,
    overview: Parser,
    programs_own: Sequence[Field],
    shown: Sequence[Field],
    all_fields: Sequence[Field],
    elsewhere: Mapping[str, str],
) -> None:
    """Print the help on a section, on `all`, or on the options that a word names or describes.

    overview:     parser for no topic.
    programs_own: fields that only the program has.
    shown:        fields of the recipe that it takes.
    all_fields:   fields of the recipe.
    elsewhere:    by flag, why it may not take a field.

    Raises ConfigError if there is nothing on the topic.
    """
    sections = sections_of(shown)
    if not topic:
        parsers = [overview]
    elif named := [name for name in sections if topic in ("all", name.replace("_", "-"), name)]:
        parsers = [_section_parser(name, shown) for name in named]
    elif found := matching(topic, [*programs_own, *shown]):
        parsers = [_group_parser(f"options for {topic!r}", found)]
    else:
        others = "; ".join(f"{each.flag}: {elsewhere[each.flag]}" for each in matching(topic, all_fields)[:6])
        allowed = f"must be another word, all, or a section: {', '.join(sections)}"
        raise ConfigError(f"--help {topic!r}: {others or f'no option names or describes it; {allowed}'}")
    print("\n".join(each.format_help() for each in parsers), end="")


def overview_parser(usage: str, description: str, fields: Sequence[Field], sections: Sequence[str]) -> Parser:
    """Return a parser of a program's own options and --help. Its help lists the sections of the recipe."""
    epilog = "\n".join(["options of the recipe:", *(f"  {name:18}{_title(name)}" for name in sections)])
    parser = Parser(usage=usage, description=f"{description}\nCONFIG is {choices()}.", epilog=epilog)
    parser.add_argument(
        *("-h", "--help"),
        nargs="*",
        metavar="WORD",
        help="Show this; the options of a section, or of all; or those that another word names or describes.",
    )
    for field in fields:
        field.add_to(parser)
    return parser


def _section_parser(name: str, fields: Sequence[Field]) -> Parser:
    """Return a parser of the options in one section of the recipe."""
    return _group_parser(f"{name}: {_title(name)}", [field for field in fields if _section_of(field) == name])


def sections_of(fields: Sequence[Field]) -> list[str]:
    """Return the sections of the recipe that options are in, first "run", for options of the run itself."""
    return list(dict.fromkeys(["run", *map(_section_of, fields)]))


def _section_of(field: Field) -> str:
    return field.path.split(".")[0] if "." in field.path else "run"


def _group_parser(title: str, fields: Sequence[Field]) -> Parser:
    parser = Parser(usage=argparse.SUPPRESS)
    group = parser.add_argument_group(title)
    for field in fields:
        field.add_to(group)
    return parser


def _title(section: str) -> str:
    return summary(get_type_hints(RunConfig).get(section, RunConfig)).rstrip(".")
