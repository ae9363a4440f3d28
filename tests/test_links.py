"""Every link, target of make and metric in README and the pages exists."""

import re
from pathlib import Path

import pytest

from launch.run.metric_log import STANDARD_METRICS
from tests.documents import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_exist(page: Path):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# Named by a loss, a reward or a draft length, or only of policies with experts, asynchronous runs, carry-over, turns or
# a teacher.
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
OPEN_NAMES |= {"rollout/turns", "rollout/observed_tokens", "rollout/failed"}
OPEN_NAMES |= {"time/tools", "time/waiting", "time/decoding"}
OPEN_NAMES |= {"teacher/divergence", "teacher/reverse_kl", "teacher/forward_kl", "teacher/overlap", "teacher/entropy"}
OPEN_NAMES |= {"teacher/stop_gap", "time/teacher"}


def test_every_metric_has_a_row_and_its_file_computes_it():
    """Rows name the file that computes a metric, unless it is that of most."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    files = dict[str, str]()
    for names, row in re.findall(r"^\| (`[a-z_]+[/`].*?) \|(.*)\|$", page, re.MULTILINE):
        (file,) = re.findall(r"`([\w/]+\.py)`", row) or ["specjax/train/metrics.py"]
        files |= dict.fromkeys(re.findall(r"`(.*?)`", names), file)
    assert set(files) == {*STANDARD_METRICS, *OPEN_NAMES}
    for name, file in files.items():
        assert name.split("/")[-1].removesuffix("NAME").removesuffix("_I") in (ROOT / file).read_text(), name
