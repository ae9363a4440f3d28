"""Every link, command and option in README and the pages exists."""

import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from launch.run.metric_log import STANDARD_METRICS
from tests.documents import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(r"python -m ((?:launch|benchmarks|examples)\.[\w.]+)((?:[^\n`]|\\\n)*)")


def prose(path: Path) -> str:
    """Return the text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@cache
def options_of(program: str) -> set[str]:
    """Return the options of a program, from its source and the schema that it reads."""
    module = importlib.import_module(f"{program}.__main__" if (ROOT / program.replace(".", "/")).is_dir() else program)
    assert module.__file__
    source = Path(module.__file__).read_text()
    if program.startswith("benchmarks.") and "parse(" not in source:
        return set(re.findall(r'"(--[a-z][\w-]*)"', source))
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(map(str, words))))
        patch.setattr("sys.stdout.write", said.append)
        for arguments in (["tiny", "--help"], ["tiny", "--help", "all"]) if "parse_run" in source else (["--help"],):
            with pytest.raises(SystemExit):
                module.main(arguments)
    return set(re.findall(r"--[a-z][\w.-]*", "".join(said)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_programs_and_options_that_exist(page: Path):
    text = page.read_text()
    for program, rest in PROGRAM.findall(text):
        words = shlex.split(rest.replace("\\\n", " ").split("#")[0].rstrip("`.,;:) "), posix=False)
        unknown = {word.rstrip(".,;:") for word in words if word.startswith("--")} - options_of(program)
        assert not {word for word in unknown if not word.startswith("--section")}, program
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# Named by a loss, a reward or a draft length, or only of policies with experts, asynchronous runs or carry-over.
OPEN_NAMES = {"reward/NAME", "loss/NAME", "rollout/acceptance_rate_pos_I"}
OPEN_NAMES |= {"router/balance_loss", "router/load_max", "router/unused", "router/rerouted"}
OPEN_NAMES |= {"asynchronous/lag", "asynchronous/waiting", "time/rollout_wait"}
OPEN_NAMES |= {
    "groups/waiting",
    "groups/unfinished",
    "groups/too_old",
    "rollout/unfinished",
    "rollout/age_mean",
    "rollout/age_max",
}
OPEN_NAMES |= {"time/rollout_mesh_busy", "time/rollout_mesh_idle", "time/training_mesh_idle"}


def test_every_metric_has_a_row_that_names_the_file_it_comes_from():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`[a-z_]+[/`].*?) \|.*\| `(.*?)` \|$", page, re.MULTILINE)
    files = {name: file for names, file in rows for name in re.findall(r"`(.*?)`", names)}
    assert set(files) == {*STANDARD_METRICS, *OPEN_NAMES}
    for name, file in files.items():
        assert name.split("/")[-1].removesuffix("NAME").removesuffix("_I") in (ROOT / file).read_text(), name
