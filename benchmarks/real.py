"""A real model on two CPU cores, from its weights to the paper's table: `make real`, or `python -m benchmarks.real`.

Fetches SmolLM2-135M-Instruct, distils an EAGLE-3 draft on the task's own prompts, evaluates, trains with GRPO,
evaluates again, and times whole steps with and without drafting. Each stage is a program of this repository, started
as a user starts it. A stage that is finished is skipped, and one that was stopped goes on, by the same command.

    --out/model/       the model
    --out/draft/       the draft, and distill.json
    --out/before.json  accuracy before training; after.json: after it; before.jsonl, after.jsonl: the answers
    --out/run/         the training run, with report.html
    --out/compare.json times of whole steps
    --out/NAME.txt     what each stage printed; stages.json: its seconds
    --report           all of it in one text
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import fetch
from launch.timing import format_provenance
from models.files import write_atomically

# Lines of progress, which a report does without.
PROGRESS = re.compile(r".*: \d+ of \d+ [\w ]+(,.*|( \.\.|; compiling \.\.))?")
SHOWN = 6  # answers shown before and after training


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
    draft, run = out / "draft", out / "run"
    networks = ("--model.path", model, "--draft.path", draft / "draft")
    trained = (*networks, "--checkpoint", run)

    def stage(name: str, program: str, *options: object) -> Stage:
        return Stage(name, ("-m", f"launch.{program}", recipe, *map(str, options)))

    def evaluation(name: str, *options: object) -> Stage:
        return stage(name, "evaluate", *options, "--json", out / f"{name}.json", "--save", out / f"{name}.jsonl")

    # By itself, the recipe would distil and evaluate too.
    training = ("--distill.steps", 0, "--eval.every", 0, "--out", run, *(("--resume",) if run.exists() else ()))
    compared = ("--steps", compared_steps, "--draft-lengths", "1,3", "--json", out / "compare.json")
    return [
        stage("distill", "distill", "--model.path", model, "--out", draft, "--temperatures"),
        evaluation("before", *networks),
        stage("train", "train", *networks, *training),
        evaluation("after", *trained),
        stage("compare", "compare", *trained, *compared),
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


def stage_seconds(out: Path) -> dict[str, Any]:
    """Return a list by stage: its seconds over all processes that worked on it, if it is finished, and its command."""
    path = out / "stages.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def report(out: Path, source: str, names: list[str]) -> str:
    """Return the text of the report: where it was measured, what each stage printed, and some answers."""
    seconds = {name: spent for name, (spent, *_) in stage_seconds(out).items()}
    parts = [
        format_provenance("benchmarks.real"),
        f"model     {source}",
        f"minutes   {', '.join(f'{name} {seconds[name] / 60:.1f}' for name in names)}; "
        f"together {sum(seconds.values()) / 60:.1f}, without fetching the model",
        before_and_after(out),
    ]
    for name in names:
        printed = (out / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        parts += ["", f"-- {name}", *(line.rstrip() for line in printed if not PROGRESS.fullmatch(line))]
    return "\n".join([*parts, "", *answers(out)]) + "\n"


def before_and_after(out: Path) -> str:
    """Return a line with accuracy, its 95% interval, and acceptance length on held-out prompts, before and after."""
    texts = []
    for name in ("before", "after"):
        (measured,) = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sets"]
        accuracy = "{value:.1%} [{low:.1%}, {high:.1%}]".format(**measured["measures"]["accuracy"])
        texts.append(f"{accuracy} {name} training at acceptance length {measured['acceptance_length']:.2f}")
    return f"accuracy  {', '.join(texts)}; {measured['prompts']} held-out prompts"


def answers(out: Path) -> list[str]:
    """Return lines with the first held-out answers before and after training, each with its reward."""
    lines = []
    for name in ("before", "after"):
        lines.append(f"-- the first answers {name} training, with their rewards")
        with (out / f"{name}.jsonl").open(encoding="utf-8") as records:
            for record in (json.loads(line) for line, _ in zip(records, range(SHOWN), strict=False)):
                lines.append(f"{record['reward']:<5.3g}  {json.dumps(record['completion'], ensure_ascii=False)}")
    return lines


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
    print(before_and_after(out))
    print(f"report: {path}; reward curves: {out / 'run' / 'report.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
