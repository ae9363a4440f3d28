"""An argparse parser that raises ConfigError and explains unknown options."""

import argparse
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from launch.cli.errors import ConfigError
from launch.cli.fields import Field
from launch.cli.option_search import named_like, spelt_like

# Most options that a message names.
MOST_NAMED = 6


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for bad input. Its result holds only the options that were given."""

    def __init__(self, *, add_help: bool = False, **settings: Any) -> None:
        settings |= {"allow_abbrev": False, "argument_default": argparse.SUPPRESS, "formatter_class": _formatter}
        super().__init__(add_help=add_help, **settings)
        # By default, argparse reads -1e-3 and -1,3 as options.
        self._negative_number_matcher = re.compile(r"-[\d.]")

    def error(self, message: str) -> NoReturn:
        """Raise the message as a ConfigError."""
        raise ConfigError(message)

    def read(self, argv: Sequence[str], fields: Iterable[Field], elsewhere: Mapping[str, str]) -> dict[str, Any]:
        """Parse a command line into {path: value} for `fields`, and {name: words} for other arguments.

        elsewhere: hints for the error message, by option of another program.
        """
        argv = [re.sub(r"^--[\w.-]+(?==|$)", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if re.match(r"-[^\d.]", word)]
            flags = [field.flag for field in fields]
            if options:
                raise ConfigError(*(f"{name}: unknown option{_hint(name, flags, elsewhere)}" for name in options))
            # `lr=1e-5`, as other libraries write options.
            name, equals, _ = unknown[0].partition("=")
            self.error(f"{unknown[0]}: unexpected argument{_hint(f'--{name}', flags, elsewhere) if equals else ''}")
        values = vars(namespace)
        for field in fields:
            if field.path in values:
                words = values[field.path]
                values[field.path] = field.read(words if isinstance(words, list) else [words])
        return values


def _hint(name: str, flags: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Return the end of a message about an option that is unknown: which one of `flags` or `elsewhere` it may be."""
    if name in elsewhere:
        return f"; {elsewhere[name]}"
    every = [*flags, *(flag for flag in elsewhere if flag not in flags)]
    found = named_like(name, flags) or named_like(name, every) or spelt_like(name, every)
    allowed = [flag for flag in found if flag in flags]
    if allowed:
        *others, last = allowed[:MOST_NAMED]
        more = f" ({len(allowed) - MOST_NAMED} more: --help {name.lstrip('-')})" if len(allowed) > MOST_NAMED else ""
        return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?{more}"
    return "".join(f"; {flag}: {elsewhere[flag]}" for flag in found[:MOST_NAMED])


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = shutil.get_terminal_size((100, 24)).columns
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=38, width=width)
