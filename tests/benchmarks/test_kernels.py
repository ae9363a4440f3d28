"""A round is timed without each kernel and with each flag. An unknown flag does not end the run."""

import pytest

from benchmarks import kernels


@pytest.mark.slow
def test_a_line_for_every_kernel_and_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    flags = {"light": {"xla_backend_optimization_level": 1}, "no such": {"xla_no_such_flag": 1}}
    monkeypatch.setattr(kernels, "FLAGS", {"cpu": flags})
    arguments = ["--preset", "tiny", "--cells", "1,0", "--without", "attend", "--flags", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["kernels", *arguments])
    kernels.main()
    lines = [line.split()[3:5] for line in capsys.readouterr().out.splitlines()[-5:]]
    assert lines == [["with", "no"], ["as", "it"], ["compiled", "again"], ["without", "attend"], ["with", "light"]]
