"""Flags are compiled into programs of their own, and one that is unknown does not end the run."""

import pytest

from benchmarks import xla_flags


@pytest.mark.slow
def test_a_line_for_every_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    flags = {"light": {"xla_backend_optimization_level": 1}, "no such": {"xla_no_such_flag": 1}}
    monkeypatch.setattr(xla_flags, "CANDIDATES", {"cpu": flags})
    arguments = ["--preset", "tiny", "--draft-lengths", "0", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["xla_flags", *arguments])
    xla_flags.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[-3:]] == ["none", "light", "no"]
    assert "refused: " in lines[-1] and "xla_no_such_flag" in lines[-1]
