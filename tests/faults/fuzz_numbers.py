"""Fuzz every numeric option of every program: `python -m tests.faults.fuzz_numbers --inputs 2000`.

Each input sets one number of one program, on its command line or in its recipe. The program runs to the end of its
set-up, before it compiles. It must accept the value, or refuse it in one line with exit code 2. A traceback, a native
abort or more than 10 s is a failure. Prints the failures, and exits with 1 if there are any.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import multiprocessing
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np

from configs.override import override
from configs.schema import RunConfig
from launch.cli.fields import Field, fields_of
from launch.cli.recipe_options import COMPARE, DIAGNOSE, DISTILL, EVALUATE, EXPORT, GENERATE, RECIPE_ONLY, TRAIN, reads
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from models.params import fitting_params

LIMIT_S = 10.0
WORDS = (
    *("-1", "0", "1", "2", "3", "7", "100", "1000", "100000", "2147483647", "2147483648", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "1e30", "-1e30", "1e400", "-1e400", "nan", "inf", "-inf", "-0"),
    *("", " 3", "3 ", "1_000", "9" * 400, "9" * 5000, "0x10", "1.5", "0.5", "1e-38", "5e-324", "-1e-3", "None", "True"),
)
VALUES = (
    *("-1", "0", "1", "2", "2**31 - 1", "2**31", "2**63", "10**400", "10**5000", "-10**5000", "1e30", "1e-38"),
    *("5e-324", "float('nan')", "float('inf')", "-float('inf')", "2.5", "True", "None", "'8'", "b'8'", "[1]", "(1,)"),
    *("{}", "1j"),
)


class Program(NamedTuple):
    """A program, and the function that marks the end of its set-up.

    Attributes:
        reading: Options of the recipe that it reads; None: it takes no recipe.
        own:     Class of the program's own options, as module:class; "": none.
        words:   Arguments that it needs. OUT is a new directory.
        end:     First function that is called after the set-up, as module:name.
        found:   Function that loads a checkpoint; replaced by one that returns the recipe's networks.
    """

    reading: tuple[str, ...] | None
    own: str
    words: tuple[str, ...]
    end: str
    found: str = ""


RUN = ("--checkpoint", "OUT")
PROGRAMS = {
    "train": Program(TRAIN, "", ("--out", "OUT"), "launch.train:record_config"),
    "distill": Program(
        DISTILL,
        "launch.distillation.offline:DistillArgs",
        (*RUN, "--out", "OUT"),
        "launch.distillation.offline:distill",
        "launch.distill:starting_params",
    ),
    "evaluate": Program(
        EVALUATE,
        "launch.evaluation.options:EvaluateArgs",
        RUN,
        "launch.evaluation.sampler:Sampler.generate",
        "launch.evaluate:params_of",
    ),
    "generate": Program(
        GENERATE,
        "launch.generate:GenerateArgs",
        (*RUN, "--prompt", "1+2="),
        "launch.evaluation.one_prompt:fixed_batches",
        "launch.generate:params_of",
    ),
    "compare": Program(COMPARE, "launch.comparison.options:CompareArgs", (), "launch.compare:trained_networks"),
    "plan": Program(TRAIN, "launch.plan.options:PlanArgs", ("--plan.gpu", "cpu"), "launch.plan.plan:plan_program"),
    "diagnose": Program(
        DIAGNOSE,
        "launch.diagnosis.options:DiagnoseArgs",
        RUN,
        "launch.diagnosis.diagnose:observe",
        "launch.diagnose:params_of",
    ),
    "export": Program(EXPORT, "launch.run.export:ExportArgs", (*RUN, "--out", "OUT"), "launch.export:export"),
    "simulate": Program(None, "benchmarks.simulation.options:SimulateArgs", (), "benchmarks.simulate:simulate"),
    "bench": Program(
        None, "benchmarks.bench.options:BenchArgs", ("--preset", "tiny"), "benchmarks.bench.__main__:random_networks"
    ),
}
# The recipe `tiny` with the smallest possible sizes.
SMALL = {
    **{f"model.architecture.{name}": 16 for name in ("hidden_size", "intermediate_size", "head_dim")},
    **{"model.architecture.num_layers": 2, "model.architecture.num_heads": 1, "model.feature_layers": (0, 1)},
    **{"draft.intermediate_size": 16, "draft.num_heads": 1, "draft.num_kv_heads": 1, "draft.vocab_size": 12},
    **{"model.architecture.max_positions": 2**31 - 1, "data.arithmetic.problems": 100, "data.held_out_count": 16},
    **{"eval.prompts": 4, "eval.every": 4},
    **{"checkpoint.every": 4, "speedup.steps": 1, "draft.lookup.kind": "history"},
}


class Case(NamedTuple):
    """One input: a program, the path of a number, its value, and whether the recipe sets it instead of an option."""

    program: str
    path: str
    value: str
    in_recipe: bool


class SetUp(Exception):
    """Raised when a program has finished its set-up."""


def cases() -> Iterator[Case]:
    """Yield all inputs."""
    for name, program in PROGRAMS.items():
        recipe = [] if program.reading is None else [*fields_of(RunConfig, small_recipe())]
        read = [field for field in recipe if reads(program.reading or (), field.path)]
        own = [*fields_of(_load(program.own))] if program.own else []
        typed = [field for field in read if not reads(RECIPE_ONLY, field.path)]
        for field, word in itertools.product(filter(_is_numeric, [*typed, *own]), WORDS):
            yield Case(name, field.path, word, in_recipe=False)
        for field, value in itertools.product(filter(_is_numeric, read), VALUES):
            yield Case(name, field.path, value, in_recipe=True)


def small_recipe() -> RunConfig:
    return override(load_recipe("tiny"), SMALL)


def _is_numeric(field: Field) -> bool:
    return any(kind in (int, float) or "int" in str(kind) or "float" in str(kind) for kind in field.kinds)


def _load(name: str) -> Any:
    module, _, names = name.partition(":")
    found = importlib.import_module(module)
    for part in names.split("."):
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """End every program at the end of its set-up, and fill networks with zeros."""

    def end(*args: Any, **options: Any) -> None:
        raise SetUp

    def same_networks(*args: Any) -> Any:
        return next(each for each in args if hasattr(each, "networks")).networks.params

    with contextlib.ExitStack() as stack:
        for program in PROGRAMS.values():
            for name, stub in ((program.end, end), (program.found, same_networks)):
                if name:
                    _load(name)
                    stack.enter_context(patch(name.replace(":", "."), stub))
        # A run without a directory, with these checkpoints and the options of the diagnosis.
        stack.enter_context(patch("launch.cli.paths.saved_steps", lambda directory: [1, 7]))
        stack.enter_context(patch("launch.run.pin_references.saved_step", lambda *args: 7))
        for name in ("read_recorded", "check_same", "saved_step", "differences"):
            stack.enter_context(patch(f"launch.diagnose.{name}", lambda *args: ()))
        stack.enter_context(patch("launch.setup.policy.init_params", _zeros))
        yield


def _zeros(init: Callable[..., Any], key: Any, mesh: Any) -> Any:
    """Return parameters of zeros. Random ones would need a compiled program for every shape."""
    shapes = fitting_params(init, mesh)
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def run(case: Case) -> None:
    """Run a program to the end of its set-up. Raises what the program raises."""
    program = PROGRAMS[case.program]
    with tempfile.TemporaryDirectory() as directory:
        argv = [word.replace("OUT", f"{directory}/out") for word in program.words]
        if program.reading is not None:
            changed = f"{{**SMALL, {case.path!r}: {case.value}}}" if case.in_recipe else "SMALL"
            recipe = Path(directory) / "recipe.py"
            recipe.write_text(
                "from configs.override import override\nfrom launch.cli.recipes import load_recipe\n"
                f"from tests.faults.fuzz_numbers import SMALL\n\nconfig = override(load_recipe('tiny'), {changed})\n"
            )
            argv.insert(0, str(recipe))
        if not case.in_recipe:
            argv += [f"--{case.path.replace('_', '-')}", case.value]
        room = ".__main__" * (case.program in ("bench", "plan"))
        package = "benchmarks" if case.program in ("bench", "simulate") else "launch"
        main = importlib.import_module(f"{package}.{case.program}{room}").main
        with contextlib.suppress(SetUp):
            main(argv)
            raise RuntimeError(f"{case.program} ended without its work")


def outcome(case: Case) -> str:
    """Run one input. Return "accepted", "refused", or the reason why it failed."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            run(case)
    except ConfigError as error:
        return "refused" if len(str(error)) < 1000 else "refused at length"
    except BaseException:
        return f"traceback\n{traceback.format_exc(limit=-4)}"
    return "accepted"


def failed(result: str) -> bool:
    return result not in ("accepted", "refused")


def _work(pipe: Any) -> None:
    """Run inputs from a pipe until it closes, and send back their outcomes."""
    with stubbed():
        outcome(Case("train", "seed", "1", in_recipe=False))
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(outcome(pipe.recv()))


class Worker:
    """A process that runs inputs. It is replaced after a hang or an abort."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def run(self, case: Case) -> str:
        self._pipe.send(case)
        try:
            if self._pipe.poll(LIMIT_S):
                return self._pipe.recv()
            result = f"hang of over {LIMIT_S:.0f} s"
        except EOFError:
            self._process.join()
            result = f"abort with exit code {self._process.exitcode}"
        self._process.kill()
        self._start()
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    every = list(cases())
    chosen = random.Random(options.seed).sample(every, min(options.inputs, len(every)))
    counts: Counter[str] = Counter()
    worker = Worker()
    for number, case in enumerate(chosen, start=1):
        result = worker.run(case)
        counts[result.splitlines()[0]] += 1
        if failed(result):
            print(f"{str(case)[:200]}: {result}", flush=True)
        if number % 100 == 0:
            print(f"{number} of {len(chosen)}: {dict(counts)}", flush=True)
    print(f"{len(chosen)} inputs of {len(every)}: {dict(counts)}")
    return 1 if any(map(failed, counts)) else 0


if __name__ == "__main__":
    sys.exit(main())
