"""Faults met with a data file of one's own."""

import json
from pathlib import Path

import pytest

import launch.generate
from launch.errors import ConfigError
from tests.launch.tokenizer_files import write_word_tokenizer
from tests.refusals import refuses


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert launch.generate.main(["own_data", *options, "--samples", "0"]) == 0
    return capsys.readouterr().out


def test_row_56_the_first_prompt_is_shown_as_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt has a system message of its own. Nothing is added, and no weights are needed."""
    model, path = write_word_tokenizer(tmp_path), tmp_path / "own.jsonl"
    chats = [
        [{"role": "system", "content": "box it"}, {"role": "user", "content": f"hello ?{' ?' * i}"}] for i in range(300)
    ]
    path.write_text("".join(json.dumps({"prompt": chat, "answer": i}) + "\n" for i, chat in enumerate(chats)))
    own = "--model.path", str(model), "--data.train", str(path)
    asked = "<user> box it <user> hello ? <bot>"
    assert shown(capsys, *own) == (
        f"{path}:1, as the model is asked, in 7 tokens:\n\n{asked}\n\nreference answer: 0\n\n"
    )
    assert "<user> hello <bot>\n" in shown(capsys, *own, "--prompt", "hello")
    assert "box it <user> hello ? world <bot>\n" in shown(capsys, *own, "--data.instruction", "{prompt} world")
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"q": "it" + " it" * i, "truth": {"value": str(i)}}) + "\n" for i in range(300))
    )
    fields = "--data.prompt-field", "q", "--data.answer-field", "truth.value"
    assert "<user> it <bot>\n\nreference answer: 0" in shown(capsys, *own[:2], "--data.train", str(other), *fields)
    with refuses("data.answer_field = answer: .../other.jsonl:1 has no such field...", ConfigError):
        shown(capsys, *own[:2], "--data.train", str(other), *fields[:2])
    with refuses("data.train = None: ", ConfigError):
        shown(capsys, *own[:2])
