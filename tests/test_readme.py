"""What the README shows runs."""

import re

import pytest

from tests.documents import ROOT, blocks, execute, section

README = ROOT / "README.md"


def run(title: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the one Python example of a section prints."""
    (example,) = blocks(section(README, title), "python")
    execute(example, README, {})
    return capsys.readouterr().out


def test_the_training_example_runs(capsys: pytest.CaptureFixture[str]):
    assert 1 <= float(run("Try it", capsys)) <= 4


def test_the_proof_of_a_drafter_verifier_and_rollout_of_ones_own_runs(capsys: pytest.CaptureFixture[str]):
    enumerated, sampled = run("Prove your own", capsys).splitlines()
    assert re.fullmatch(r"off by \d\.\de-1\d in 2268 rounds enumerated .*", enumerated)
    assert re.search(r"0 impossible of 100000 draws: p = .* at level 1e-06, .* fails with chance (0\.99|1)", sampled)


def test_every_program_named_exists():
    for program in set(re.findall(r"python -m (launch\.\w+)", README.read_text())):
        path = README.parent / program.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
