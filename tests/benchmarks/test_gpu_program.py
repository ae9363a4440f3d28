"""What a program is found to hold is what it holds; here it is compiled for the CPU, which every machine has."""

import re
from types import SimpleNamespace

import jax
import pytest

from benchmarks import gpu_program


def test_a_line_for_every_draft_length_and_array_of_logits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    here = SimpleNamespace(devices=jax.devices()[:1])
    monkeypatch.setattr(gpu_program.topologies, "get_topology_desc", lambda **_: here)
    arguments = ["--preset", "tiny", "--batch", "3", "--context", "16", "--draft-lengths", "0", "1"]
    monkeypatch.setattr("sys.argv", ["gpu_program", *arguments])
    gpu_program.main()
    plain, drafting = capsys.readouterr().out.split("\nk = ")[1:]
    kernels = [int(re.search(r"(\d+) kernels", text)[1]) for text in (plain, drafting)]  # pyright: ignore[reportOptionalSubscript]
    assert 30 < kernels[0] < kernels[1]
    # A CPU's program has loops within a round, for some of its reductions.
    waits = [int(re.search(r"(\d+) loops or conditions", text)[1]) for text in (plain, drafting)]  # pyright: ignore[reportOptionalSubscript]
    assert 0 < waits[0] <= waits[1]
    for text, tokens in ((plain, 1), (drafting, 2)):
        assert ", 0 copies of a cache, " in text
        assert re.search(rf"vocabulary's size: f32\[{3 * tokens},256\] .*unembed", text)
