"""Parts of a session on a lent GPU, in order of value. Each is a program that can also be run by itself."""

from dataclasses import dataclass
from pathlib import Path

REHEARSAL = str(Path(__file__).with_name("rehearsal.py"))
# Compiling takes most of the time, so: no program for each choice of draft lengths, only answers without the draft,
# and one bucket for all rows.
FEW_PROGRAMS = "--automatic False --distill.chunks 1 --microbatches 1 --ladder 152"


@dataclass(frozen=True)
class Part:
    """A program to run.

    Attributes:
        name:    Name of the part.
        minutes: Its limit.
        command: Module and arguments. The last one is the file of its results.
    """

    name: str
    minutes: float
    command: tuple[str, ...]

    @property
    def results(self) -> Path:
        """Return the JSON file of its results."""
        return Path(self.command[-1])


def parts(out: Path, *, tiny: bool = False) -> list[Part]:
    """Return all parts.

    Args:
        out:  Directory of their JSON files.
        tiny: Choose sizes at which each takes a CPU a minute or two.
    """

    def part(name: str, minutes: float, full: str, small: str) -> Part:
        words = (small if tiny else full).split()
        return Part(name, minutes, (*words, "--json", str(out / f"{name}.json")))

    small_steps = "--preset tiny --prompts 2 --samples 2 --prompt 8 --median 4 --microbatches 1 --turns 2"
    return [
        part(
            "steps",
            3,
            "benchmarks.gpu.steps --preset qwen3-1.7b --rank 0",
            f"benchmarks.gpu.steps {small_steps} --rank 0",
        ),
        part(
            "lora",
            4.75,
            "benchmarks.gpu.steps --preset qwen3-8b --rank 32",
            f"benchmarks.gpu.steps {small_steps} --rank 4",
        ),
        part(
            "smoke",
            1.25,
            "benchmarks.gpu.smoke --preset tiny --lengths 3 --draws 65536",
            "benchmarks.gpu.smoke --preset tiny --lengths 2 --draws 16384",
        ),
        part(
            "update",
            1.25,
            "benchmarks.bench --sections update --preset qwen3-8b-8-layers --contexts 4096 20480 --repeats 3",
            "benchmarks.bench --sections update --preset tiny --contexts 64 --repeats 2",
        ),
        part(
            "rounds",
            2.25,
            "benchmarks.bench --sections draft --preset qwen3-8b --batches 32 1 --contexts 1024 --draft-lengths 3 "
            "--rates 0.6 0.8 --repeats 3",
            "benchmarks.bench --sections draft --preset tiny --batches 2 --contexts 64 --draft-lengths 2 --rates 0.8 "
            "--repeats 2",
        ),
        part(
            "scratch",
            3.5,
            f"launch.compare scratch_100m {FEW_PROGRAMS} --data.prompts 16 --steps 12 --draft-lengths 0,3 "
            "--warmup.steps 240 --distill.answers 1536 --distill.steps 200",
            f"launch.compare {REHEARSAL} {FEW_PROGRAMS} --steps 2 --draft-lengths 0,2",
        ),
    ]
