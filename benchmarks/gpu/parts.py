"""Parts of a session on a lent GPU, in order of value. Each is a program that can also be run by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REHEARSAL = str(Path(__file__).with_name("rehearsal.py"))
# Few programs, because compiling takes most of the time: one bucket for all rows, no chosen draft lengths, answers
# without the draft.
FEW_PROGRAMS = "--automatic False --distill.chunks 1"


@dataclass(frozen=True)
class Part:
    """A program to run.

    Attributes:
        name:    Name of the part and of its JSON file.
        minutes: Its limit if all parts share 12 minutes. Time that a part leaves is divided among the later ones.
        command: Module and arguments.
        memory:  Fraction of the GPU's memory that JAX takes at its start.
        missing: Reason why it cannot run here; None: it can.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    memory: float = 0.92
    missing: str | None = None


def parts(out: Path, *, tiny: bool = False, model: Path | None = None, training: Sequence[str] = ()) -> list[Part]:
    """Return all parts.

    Args:
        out:      Directory of their JSON files.
        tiny:     Choose sizes at which each takes a CPU a minute or two.
        model:    Directory of a policy in Hugging Face layout. None: the part `model` is skipped.
        training: Recipe to train that policy with, and its further options.
    """

    def part(name: str, minutes: float, full: str, small: str, memory: float = 0.92) -> Part:
        words = (small if tiny else full).split()
        return Part(name, minutes, (*words, "--json", str(out / f"{name}.json")), memory)

    def bench(name: str, minutes: float, section: str, options: str, memory: float = 0.92) -> Part:
        small = f"launch.bench --sections {section} --preset tiny --batches 1 --contexts 64 --repeats 2"
        return part(name, minutes, f"launch.bench --sections {section} {options}", small, memory)

    compared = [*training, "--model.path", str(model), "--json", str(out / "model.json")]
    missing = None if model else "no --model was given"
    return [
        part(
            "scratch",
            4.5,
            f"launch.compare scratch_100m {FEW_PROGRAMS} --ladder 152 --microbatches 1 --data.prompts 16 --steps 20 "
            "--draft-lengths 0,3,5 --warmup.steps 300 --distill.steps 400 --distill.answers 2048",
            f"launch.compare {REHEARSAL} {FEW_PROGRAMS} --ladder 152 --steps 2 --draft-lengths 0,2",
        ),
        Part("model", 3, ("launch.compare", *compared), missing=missing),
        part(
            "smoke",
            1.5,
            "benchmarks.gpu.smoke",
            "benchmarks.gpu.smoke --preset tiny --lengths 2 --draws 16384",
        ),
        bench("update", 1.5, "update", "--preset qwen3-8b-8-layers --contexts 4096 20480 --repeats 3"),
        bench("rollouts", 1.5, "acceptance", "--preset qwen3-8b"),
        bench("drafting", 2, "draft", "--preset qwen3-8b"),
        bench("decoding", 2, "floor", "--preset qwen3-8b"),
        # Other samplers take memory beside JAX.
        bench("peers", 2, "peers", "--preset qwen3-1.7b", memory=0.45),
    ]
