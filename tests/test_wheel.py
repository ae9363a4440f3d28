"""The wheel holds all that the programs need: they run from a fresh environment, outside the checkout."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from tests.documents import ROOT
from tests.launch.programs import LEAST, argv, metrics

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("specjax", "models", "configs", "launch")


def test_every_file_of_the_packages_is_installed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    known = {path for name, patterns in data.items() for pattern in patterns for path in folder(name).glob(pattern)}
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    assert {path for path in files if path.suffix not in (".py", ".pyc")} == known
    assert all((path.parent / "__init__.py").exists() for path in files if path.suffix == ".py")
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert [name.removesuffix("*") for name in found] == list(PACKAGES)


def folder(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def test_the_command_is_a_function():
    module, _, name = PROJECT["project"]["scripts"]["specjax"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def called(command: Sequence[str | Path], place: Path, **environment: str) -> str:
    """Run a command in the directory `place`, as a user would. Return its output."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=place, env=own | environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with the wheel, which takes dependencies from this one."""
    place = tmp_path_factory.mktemp("installed")
    source, environment = place / "source", place / "environment"
    for package in PACKAGES:  # a build leaves files in its source
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Without setuptools here, pip fetches it.
    isolated = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    called([*pip, "wheel", "--no-deps", *isolated, "--wheel-dir", place, source], place)
    venv.create(environment, symlinks=True)
    called([*pip, "--python", environment, "install", "--no-deps", *place.glob("*.whl")], place)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


@pytest.mark.slow
def test_installed_programs_run_outside_the_checkout(programs: Path, tmp_path: Path):
    names = ", ".join(PACKAGES)
    told = called([programs / "python", "-c", f"import {names}\nfor x in {names}: print(x.__file__)"], tmp_path)
    assert all(Path(line).is_relative_to(programs.parent) for line in told.splitlines())
    # A module in the working directory, which a worker imports, beside a folder that is called like a package of ours.
    (tmp_path / "my_rewards.py").write_text("def score(completion, answer):\n    return float(answer in completion)\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()

    def specjax(*words: str) -> str:
        cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        return called([programs / "specjax", *words], tmp_path, JAX_COMPILATION_CACHE_DIR=cache)

    assert "train a policy" in specjax("--help")
    assert re.search(r"^[\d+]+=$", specjax("generate", "tiny", "--samples", "0"), re.MULTILINE)
    small = argv("tiny", LEAST | {"--reward.scorer": "my_rewards:score", "--reward.workers": "1"})
    said = specjax("train", *small, "--steps", "2", "--out", "run", "--speedup.steps", "0")
    assert len(metrics(tmp_path / "run")) == 2 and "report: run/report.html" in said
    assert "tokens/s" in specjax("generate", "run", "--prompt", "1+2=")
    assert "accuracy" in specjax("evaluate", "run", "--prompts", "4")
    assert specjax("report", "run").strip() == "run/report.html"
