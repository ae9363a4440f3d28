"""Time whole GRPO steps beside TRL's GRPOTrainer, in turns: the same weights, problems, batch and budget of tokens.

    python -m benchmarks.beside_trl --trl-python ENV/bin/python --model build/real/model

ENV is an environment of its own: `pip install trl torch torchvision`. The task is that of `make real`, without a draft.
TRL trains in bfloat16 autocast. Every turn is a process; its first step, which compiles or warms up, is left out.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.start import Start, start
from configs.smollm2_extraction import config
from launch.data.extraction import problems
from launch.timing import describe_interval, format_interval, format_provenance, one_turn

LIMIT_S = 1800.0
TRL_STEPS = Path(__file__).with_name("trl_steps.py")


def ours(model: Path, steps: int, cache: Path) -> Start:
    """Return the steps of `launch.train smollm2_extraction` without a draft and without an evaluation."""
    options = {"model.path": model.resolve(), "draft.kind": "none", "distill.steps": 0}
    options |= {"eval.every": 0, "checkpoint.every": 1000, "rollout.draft-lengths": 0}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return start(Path(), ["smollm2_extraction", *words], steps, cache, LIMIT_S)


def trl(python: Path, model: Path, steps: int, out: str) -> dict[str, Any]:
    """Return the seconds, lengths and memory that `benchmarks/trl_steps.py` prints in TRL's environment."""
    rollout, count = config.rollout, config.data.prompts
    options = {
        "model": str(model.resolve()),
        "prompts": [problem.prompt for problem in problems(config.seed)[0][: count * steps]],
        "groups": count,
        "group_size": rollout.group_size,
        "max_new_tokens": rollout.max_new_tokens,
        "temperature": rollout.law.temperature,
        "steps": steps,
        "out": out,
    }
    # Without -P, modules of this directory would stand before packages of the same names.
    command = [str(python), "-P", str(TRL_STEPS), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=out, check=False)
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions(python: Path) -> str:
    """Return the versions of trl, torch and transformers in an environment."""
    code = "import trl, torch, transformers as hf; print(trl.__version__, torch.__version__, hf.__version__)"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Print the steps of both, turn by turn, and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="Python of an environment with trl")
    parser.add_argument(
        "--model", type=Path, default=Path("build/real/model"), help="the model that `make real` fetches"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, the first of which is not timed")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    print(format_provenance("benchmarks.beside_trl"))
    print(f"trl, torch, transformers  {versions(args.trl_python)}")
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as out:
        runs = {
            "specjax": partial(ours, args.model, args.steps, Path(out) / "cache"),
            "TRL": partial(trl, args.trl_python, args.model, args.steps, out),
        }
        for number in range(args.turns):
            turn: dict[str, Any] = one_turn(runs, number)
            mine, theirs = turn["specjax"], turn["TRL"]
            seconds = mine.steps, theirs["seconds"][1:]
            ratios.append(statistics.median(seconds[1]) / statistics.median(seconds[0]))
            for name, steps, peak in (("specjax", seconds[0], mine.peak_gib), ("TRL", seconds[1], theirs["peak_gib"])):
                shown = " ".join(f"{x:.1f}" for x in steps)
                print(f"turn {number + 1}  {name:<8} {shown} s a step; peak {peak:.1f} GiB", flush=True)
            tokens = statistics.mean(theirs["lengths"])
            print(f"turn {number + 1}  TRL over specjax {ratios[-1]:.2f}; TRL's completions have {tokens:.0f} tokens")
    print(f"TRL's median step over ours: {format_interval(ratios)}{describe_interval(len(ratios))}")


if __name__ == "__main__":
    main()
