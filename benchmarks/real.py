"""A real model on two CPU cores, from its weights to the paper's table: `make real`, or `python -m benchmarks.real`.

Fetches SmolLM2-135M-Instruct, distils an EAGLE-3 draft on the task's own prompts, evaluates, trains with GRPO,
evaluates again, and times whole steps with and without drafting. In the second half the same start learns from the
trained policy, its teacher, without rewards. Each stage is a program of this repository, started as a user starts it. A
stage that is finished is skipped, and one that was stopped goes on, by the same command.

    --out/model/       the model
    --out/draft/       the draft, and distill.json
    --out/before.json  accuracy before training; after.json: after it; before.jsonl, after.jsonl: the answers
    --out/run/         the training run, with report.html
    --out/compare.json times of whole steps
    --out/teacher/     the trained policy; taught/: the run that learns from it; taught.json, taught.jsonl: its answers
    --out/NAME.txt     what each stage printed; stages.json: its seconds
    --report           all of it in one text
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_report import accuracies, report, stage_seconds
from benchmarks.smollm2 import fetch
from models.files import write_atomically


@dataclass(frozen=True)
class Stage:
    """One program: its name in files and messages, and its command line."""

    name: str
    command: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command line by which a stage of an earlier process is known, the same whether it resumes or not."""
        return " ".join(word for word in self.command if word != "--resume")


def stages(recipe: str, model: Path, out: Path, compared_steps: int) -> list[Stage]:
    """Return the stages in order. Their options go on with what an earlier process has left in `out`."""
    draft, run, teacher, taught = (out / name for name in ("draft", "run", "teacher", "taught"))
    networks = ("--model.path", model, "--draft.path", draft / "draft")
    trained = (*networks, "--checkpoint", run)

    def stage(name: str, program: str, *options: object) -> Stage:
        return Stage(name, ("-m", f"launch.{program}", recipe, *map(str, options)))

    def evaluation(name: str, *options: object) -> Stage:
        return stage(name, "evaluate", *options, "--json", out / f"{name}.json", "--save", out / f"{name}.jsonl")

    def training(name: str, to: Path, *options: object) -> Stage:
        # By itself, the recipe would distil and evaluate too.
        added = ("--distill.steps", 0, "--eval.every", 0, "--out", to, *(("--resume",) if to.exists() else ()))
        return stage(name, "train", *networks, *options, *added)

    exporting = "-m", "launch.export", str(run), "--out", str(teacher)
    learning = "--teacher.path", teacher, "--reward.scorer", "none", "--reward.also"
    compared = ("--steps", compared_steps, "--draft-lengths", "1,3", "--json", out / "compare.json")
    return [
        stage("distill", "distill", "--model.path", model, "--out", draft, "--temperatures"),
        evaluation("before", *networks),
        training("train", run),
        evaluation("after", *trained),
        stage("compare", "compare", *trained, *compared),
        Stage("export", exporting),
        training("teach", taught, *learning),
        evaluation("taught", *networks, "--checkpoint", taught),
    ]


def run_stage(stage: Stage, out: Path) -> int:
    """Run a stage, show and keep what it prints, add its seconds to stages.json, and return its exit code.

    Output and seconds are written with every line, so that they are there even if this process is killed.
    """
    print(f"== {stage.name}: python {' '.join(stage.command)}", flush=True)
    start, seconds = time.monotonic(), stage_seconds(out)
    before = seconds[stage.name][0] if stage.name in seconds else 0.0

    def record(finished: bool) -> None:
        seconds[stage.name] = before + time.monotonic() - start, finished, stage.line
        write_atomically(out / "stages.json", json.dumps(seconds, indent=2) + "\n")

    with (
        (out / f"{stage.name}.txt").open("a", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            [sys.executable, *stage.command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        ) as process,
        stop_signals_to(process),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            record(finished=False)
    record(finished=process.returncode == 0)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def stop_signals_to(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave it to the program to stop at SIGTERM and Ctrl-C, after it has saved its state. It gets Ctrl-C by itself."""
    replaced = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def main() -> int:
    """Run the stages that are not finished, and write and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2_extraction", help="recipe, or the path of one")
    parser.add_argument("--model", type=Path, help="a model's directory; by default the model is fetched")
    parser.add_argument("--out", type=Path, default=Path("build/real"), help="directory for everything that is kept")
    parser.add_argument("--report", type=Path, help="file for the report; by default OUT/report.txt")
    parser.add_argument("--compared-steps", type=int, default=6, help="steps of each variant that are timed")
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    model, source = fetch(out / "model") if options.model is None else (options.model, str(options.model))
    print(f"model: {source}", flush=True)
    todo = stages(options.recipe, model, out, options.compared_steps)
    earlier = stage_seconds(out)
    for stage in todo:
        if stage.name in earlier and earlier[stage.name][2:] != [stage.line]:
            parser.error(f"--out = {out}: its stage {stage.name} has other options; must be another directory")
    for stage in todo:
        if stage.name in earlier and earlier[stage.name][1]:
            print(f"== {stage.name}: finished earlier")
            continue
        if code := run_stage(stage, out):
            print(f"{stage.name}: stopped with exit code {code}; the same command goes on from there", file=sys.stderr)
            return code
    text = report(out, source, [stage.name for stage in todo])
    path = options.report or out / "report.txt"
    write_atomically(path, text)
    print("\n".join(accuracies(out)))
    print(f"report: {path}; reward curves: {out / 'run' / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
