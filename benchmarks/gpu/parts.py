"""Parts of a session on a lent GPU, in order of value. Each is a program that can also be run by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REHEARSAL = str(Path(__file__).with_name("rehearsal.py"))
# Compiling takes most of the time, so: no program for each choice of draft lengths, only answers without the draft,
# and one bucket for all rows.
FEW_PROGRAMS = "--automatic False --distill.chunks 1 --microbatches 1"
# Recipe and options of the part `model`. 144 is its longest row.
TRAINING = (
    f"smollm2_extraction {FEW_PROGRAMS} --ladder 144 --data.prompts 16 --steps 12 --draft-lengths 0,3 "
    "--distill.answers 4096 --distill.batch-size 64 --distill.steps 500"
)


@dataclass(frozen=True)
class Part:
    """A program to run.

    Attributes:
        name:    Name of the part and of its JSON file.
        minutes: Its limit. If there is more time than all parts need, it is divided among them.
        command: Module and arguments.
        missing: Reason why it cannot run here; None: it can.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    missing: str | None = None


def parts(
    out: Path, *, tiny: bool = False, model: Path | None = None, training: Sequence[str] = TRAINING.split()
) -> list[Part]:
    """Return all parts.

    Args:
        out:      Directory of their JSON files.
        tiny:     Choose sizes at which each takes a CPU a minute or two.
        model:    Directory of a policy, as benchmarks.gpu.model takes it. None: the part `model` is skipped.
        training: Recipe to train that policy with, and its further options.
    """

    def part(name: str, minutes: float, full: str, small: str) -> Part:
        words = (small if tiny else full).split()
        return Part(name, minutes, (*words, "--json", str(out / f"{name}.json")))

    shorter = "--steps 1 --distill.answers 64 --distill.steps 2".split() if tiny else ()
    compared = "benchmarks.gpu.model", str(model), *training, *shorter, "--json", str(out / "model.json")
    return [
        part(
            "scratch",
            5,
            f"launch.compare scratch_100m {FEW_PROGRAMS} --ladder 152 --data.prompts 16 --steps 20 "
            "--draft-lengths 0,3,5 --warmup.steps 300 --distill.answers 2048 --distill.steps 200",
            f"launch.compare {REHEARSAL} {FEW_PROGRAMS} --ladder 152 --steps 2 --draft-lengths 0,2",
        ),
        part(
            "lora",
            5,
            "benchmarks.gpu.lora --preset qwen3-8b --rank 32 --draft-lengths 3 5",
            "benchmarks.gpu.lora --preset tiny --rank 4 --draft-lengths 1 --rates 0.8 --prompts 2 --samples 2 "
            "--median 4 --microbatches 1 --repeats 1",
        ),
        Part("model", 5, compared, missing=None if model else "no --model was given"),
        part(
            "smoke",
            1.5,
            "benchmarks.gpu.smoke --preset tiny --lengths 3 --draws 65536",
            "benchmarks.gpu.smoke --preset tiny --lengths 2 --draws 16384",
        ),
        part(
            "update",
            3,
            "benchmarks.bench --sections update --preset qwen3-8b-8-layers --contexts 4096 20480 --repeats 3",
            "benchmarks.bench --sections update --preset tiny --contexts 64 --repeats 2",
        ),
        part(
            "rounds",
            6,
            "benchmarks.bench --sections draft --preset qwen3-8b --batches 32 1 --contexts 1024 8192 "
            "--draft-lengths 3 5 --rates 0.6 0.8 --repeats 3",
            "benchmarks.bench --sections draft --preset tiny --batches 2 --contexts 64 --draft-lengths 1 2 --rates 0.8 "
            "--repeats 2",
        ),
        part(
            "rollouts",
            2.5,
            "benchmarks.bench --sections acceptance --preset qwen3-8b --draft-lengths 3 5 --rates 0.8 --repeats 3",
            "benchmarks.bench --sections acceptance --preset tiny --draft-lengths 1 --rates 0.8 --repeats 2",
        ),
    ]
