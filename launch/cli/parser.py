"""An argparse parser that raises ConfigError and explains unknown options."""

import argparse
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from launch.cli.fields import Field
from launch.cli.option_search import hint
from launch.errors import ConfigError


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
            if options:
                raise ConfigError(*(f"{name}: unknown option{hint(name, fields, elsewhere)}" for name in options))
            # `lr=1e-5`, as other libraries write options.
            name, equals, _ = unknown[0].partition("=")
            self.error(f"{unknown[0]}: unexpected argument{hint(f'--{name}', fields, elsewhere) if equals else ''}")
        values = vars(namespace)
        for field in fields:
            if field.path in values:
                words = values[field.path]
                values[field.path] = field.read(words if isinstance(words, list) else [words])
        return values


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = shutil.get_terminal_size((100, 24)).columns
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=38, width=width)
