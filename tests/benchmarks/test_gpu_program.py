"""The report finds what a program holds; here programs are compiled for the CPU, which every machine has."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_program
from launch.bench.models import Functions, functions
from launch.bench.presets import Preset
from specjax.types import PolicyOutput


def reported(draft_lengths: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the printed lines of rounds at each draft length."""
    here = SimpleNamespace(devices=jax.devices()[:1])
    monkeypatch.setattr(gpu_program.topologies, "get_topology_desc", lambda **_: here)
    arguments = f"--preset tiny --batch 3 --context 16 --draft-lengths {draft_lengths}".split()
    monkeypatch.setattr("sys.argv", ["gpu_program", *arguments])
    gpu_program.main()
    return capsys.readouterr().out.split("\nk = ")[1:]


def counted(what: str, text: str) -> int:
    found = re.search(rf"(\d+) {what}", text)
    assert found is not None
    return int(found[1])


def test_a_line_for_every_draft_length_and_array_of_logits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain, drafting = reported("0 1", monkeypatch, capsys)
    assert 30 < counted("kernels", plain) < counted("kernels", drafting)
    for text, tokens in ((plain, 1), (drafting, 2)):
        assert ", 0 copies of a cache, " in text
        assert re.search(rf"vocabulary's size: f32\[{3 * tokens},256\] .*unembed", text)


def test_a_loop_within_a_round_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A CPU has some or none of those that XLA makes itself, depending on the version of jax."""
    (before,) = reported("0", monkeypatch, capsys)

    def looping(preset: Preset) -> Functions:
        made = functions(preset)

        def apply(*args: Any, **options: Any) -> PolicyOutput:
            output = made.policy.apply(*args, **options)
            logits = jax.lax.while_loop(lambda x: jnp.max(x) > 1e9, lambda x: 0.5 * x, output.logits)
            return replace(output, logits=logits)

        return made._replace(policy=replace(made.policy, apply=apply))

    monkeypatch.setattr(gpu_program, "functions", looping)
    (after,) = reported("0", monkeypatch, capsys)
    assert counted("loops or conditions", after) == counted("loops or conditions", before) + 1
