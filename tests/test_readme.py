"""README's examples run, and every option that a document names exists."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import launch.plan.__main__
import launch.trainer
from configs.override import override
from configs.schema import KINDS
from launch.cli.options import parse_run
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from launch.rewards.scorers import load_scorer
from tests.documents import ROOT, blocks, execute, section
from tests.launch.checkpoints import write_checkpoint
from tests.launch.programs import SHRUNK

README = ROOT / "README.md"
LIMIT = 200


def run(page: Path, title: str, capsys: pytest.CaptureFixture[str], names: dict[str, Any] | None = None) -> str:
    """Run the only Python example of a section. Return its output. names: get those that it defines."""
    (example,) = blocks(section(page, title), "python")
    execute(example, page, {} if names is None else names)
    return capsys.readouterr().out


def test_a_run_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    # An existing local path takes precedence over a name on the hub.
    write_checkpoint(tmp_path / "Qwen/Qwen3-0.6B")
    changed = {"rollout.draft_lengths": (0, 2), "eval.prompts": 4, "data.max_prompt_tokens": LIMIT}
    small = override(load_recipe("own_data"), SHRUNK | changed)
    monkeypatch.setattr(launch.trainer, "load_recipe", {"own_data": small}.__getitem__)
    names: dict[str, Any] = {}
    said = run(README, "Try it", capsys, names)
    assert "sequences of up to 16 + 8 tokens" in said, "as wide as its longest prompt"
    longer = "What is 7 + 8? " * 8
    assert isinstance(names["run"].generate(longer)[0], str), "longer than any that it trained on"
    assert isinstance(names["run"].generate([{"role": "user", "content": "What is 7 + 8?"}])[0], str)
    with pytest.raises(ConfigError, match="must be text or a list of messages"):
        names["run"].generate(["What is 7 + 8?"])
    with pytest.raises(ConfigError, match=f"prompt: must have 1 .. {LIMIT} tokens"):
        names["run"].generate(longer * LIMIT)
    assert "draft: EAGLE-3 head" in said and re.search(r"^held-out accuracy \d+\.\d% \['", said, re.MULTILINE)
    assert "automatic" in said
    assert (tmp_path / "policy/model.safetensors").exists() and (tmp_path / "draft/made_for.json").exists()
    recorded = json.loads((tmp_path / "runs/own_data/config.json").read_text())
    assert (recorded["steps"], recorded["model"]["path"]) == (50, "Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match="reward.scorer = python:reward"):
        load_scorer(recorded["reward"]["scorer"])


def test_the_step_of_ones_own_networks(capsys: pytest.CaptureFixture[str]):
    assert 1 <= float(run(ROOT / "docs" / "api.md", "A step of your own networks", capsys)) <= 4


def test_the_proof_example_runs(capsys: pytest.CaptureFixture[str]):
    enumerated, sampled = run(README, "Prove your own", capsys).splitlines()
    assert re.fullmatch(r"off by \d\.\de-1\d in 2268 rounds enumerated .*", enumerated)
    assert re.search(r"0 impossible of 100000 draws: p = .* at level 1e-06, .* fails with chance (0\.99|1)", sampled)


def options_of(table: str) -> list[list[str]]:
    """Return the options in each row of a table. Words after an option's value are left out."""
    return [shlex.split(code) for code in re.findall(r"`(--[^`]+)`", table)]


def test_every_algorithm_is_options_that_go_together():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    table = re.search(r"^\| \| options \|\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    assert table
    told = options_of(table[1])
    assert len(told) >= len(table[1].splitlines()) - 1
    importance = next(options for options in told if options[0] == "--loss.importance")
    told += [["--loss.importance", kind] for kind in ("sequence", "icepop")]
    plain = parse_run(["gsm8k"], "", "")
    for options in told:
        if options is not importance:  # token is the default
            assert parse_run(["gsm8k", *options], "", "") != plain, options


@pytest.mark.parametrize("path", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_every_option_of_a_recipe_that_is_named_exists(path: Path, capsys: pytest.CaptureFixture[str]):
    for kind in KINDS:
        with pytest.raises(SystemExit):
            parse_run(["tiny", "--draft.kind", kind, "--help", "all"], "", "")
    with pytest.raises(SystemExit):
        launch.plan.__main__.main(["--help"])
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    named = set(re.findall(r"--(?!section)[a-z-]+(?:\.[a-z-]+)+\b(?!\.[\w*])", path.read_text()))
    assert named - known == set()
