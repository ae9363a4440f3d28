"""The text of --help, a screen at a time: an overview of a program, or the options of one section."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.cli.fields import Field, summary

RUN = "run"
# Longer options have their help on the next line.
_LONGEST = 42


def overview(usage: str, description: str, own: Sequence[Field], sections: dict[str, list[Field]]) -> str:
    """Return what the program does, its own options, and a line for each section of the recipe's options."""
    lines = [f"usage: {usage}", "", description.strip()]
    if own:
        lines += ["", *_rows(own)]
    if sections:
        lines += ["", "Options of the recipe, by section. --help SECTION lists those of one, --help all every one."]
        width = max(map(len, sections)) + 2
        lines += [f"  {name:{width}}{_title(name)}" for name in sections]
    return "\n".join(lines)


def section_text(topic: str, sections: dict[str, list[Field]]) -> str:
    """Return the options of the section `topic`, or of all. Raises ConfigError if there is no such section."""
    if topic != "all" and topic not in sections:
        raise ConfigError(f"--help {topic}: must be one of all, {', '.join(sections)}")
    shown = sections if topic == "all" else {topic: sections[topic]}
    return "\n\n".join("\n".join([f"{name}: {_title(name)}", *_rows(fields)]) for name, fields in shown.items())


def by_section(fields: Iterable[Field]) -> dict[str, list[Field]]:
    """Return fields of a run by their section; those of the run itself come first."""
    sections: dict[str, list[Field]] = {RUN: []}
    for field in fields:
        sections.setdefault(field.path.split(".")[0] if "." in field.path else RUN, []).append(field)
    return {name: inside for name, inside in sections.items() if inside}


def _title(section: str) -> str:
    if section == RUN:
        return "Length, seed, directory and memory."
    return summary(type(getattr(RunConfig(name="", steps=1), section)))


def _rows(fields: Iterable[Field]) -> list[str]:
    lefts = {f"  {field.flag} {field.metavar}  ": field for field in fields}
    width, rows = shutil.get_terminal_size((100, 24)).columns, []
    start = max((len(left) for left in lefts if len(left) <= _LONGEST), default=_LONGEST)
    for left, field in lefts.items():
        text = field.help
        if field.default is not dataclasses.MISSING:
            value = field.default
            text += f" [{' '.join(map(str, value)) or 'none' if isinstance(value, tuple) else value}]"
        wrapped = textwrap.wrap(text, max(width - start, 30)) or [""]
        rows.append(left.rstrip() if len(left) > start else f"{left:{start}}{wrapped.pop(0)}")
        rows += [" " * start + line for line in wrapped]
    return rows
