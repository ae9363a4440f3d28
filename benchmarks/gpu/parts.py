"""Parts of a session on a lent GPU, in order of value. Each is a program that can also be run by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REHEARSAL = str(Path(__file__).with_name("rehearsal.py"))


@dataclass(frozen=True)
class Part:
    """A program to run.

    Attributes:
        name:    Name of the part and of its JSON file.
        minutes: Its limit if all parts share 25 minutes. Time that a part leaves is divided among the later ones.
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

    def bench(name: str, minutes: float, section: str, preset: str = "qwen3-8b", memory: float = 0.92) -> Part:
        small = f"launch.bench --sections {section} --preset tiny --batches 1 --contexts 64 --repeats 2"
        return part(name, minutes, f"launch.bench --sections {section} --preset {preset}", small, memory)

    compared = [*training, "--model.path", str(model), "--json", str(out / "model.json")]
    missing = None if model else "no --model was given"
    return [
        part(
            "smoke",
            3,
            "benchmarks.gpu.smoke",
            "benchmarks.gpu.smoke --preset tiny --lengths 2 --draws 16384",
        ),
        part(
            "program",
            2,
            "benchmarks.gpu.program --draft-lengths 0 3 --recipe scratch_100m",
            f"benchmarks.gpu.program --preset tiny --batch 2 --context 16 --draft-lengths 2 --recipe {REHEARSAL}",
        ),
        part(
            "attention",
            3,
            "benchmarks.gpu.attention",
            "benchmarks.gpu.attention --preset tiny --batches 2 --contexts 64 --repeats 2 --passes 1",
        ),
        bench("decoding", 3, "floor"),
        bench("drafting", 4, "draft"),
        bench("acceptance", 3, "acceptance"),
        # Other samplers take memory beside JAX.
        bench("peers", 2, "peers", "qwen3-1.7b", memory=0.45),
        Part("model", 3, ("launch.compare", *compared), missing=missing),
        part(
            "scratch",
            2,
            "launch.compare scratch_100m --steps 6 --draft-lengths 0,1,3,5 --warmup.steps 300 --distill.steps 150",
            f"launch.compare {REHEARSAL} --steps 1 --draft-lengths 0,2",
        ),
    ]
