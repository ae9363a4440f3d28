"""Time whole steps of a model from files: `python -m benchmarks.gpu.model DIR RECIPE [options of launch.compare]`.

DIR is the model in Hugging Face layout, or holds the pieces of its GGUF file (`split -n 2 X.gguf X.gguf.`), whose
4-bit weights are then written to DIR/model.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.smollm2 import dequantise
from models.files import new_directory


def from_pieces(directory: Path) -> Path:
    """Return the model's directory: DIR/model, made from the pieces of a GGUF file, or DIR itself if there are none."""
    pieces, model = sorted(directory.glob("*.gguf.*")), directory / "model"
    if pieces and not model.exists():
        with TemporaryDirectory() as temporary, new_directory(model) as new:
            joined = Path(temporary) / "model.gguf"
            with joined.open("wb") as target:
                for piece in pieces:
                    with piece.open("rb") as source:
                        shutil.copyfileobj(source, target)
            dequantise(joined, new)
    return model if pieces else directory


def main(argv: list[str]) -> None:
    """Replace this process by launch.compare, so that signals reach it and no memory of the conversion is kept."""
    directory, recipe, *options = argv
    compare = ("-m", "launch.compare", recipe, "--model.path", str(from_pieces(Path(directory))), *options)
    os.execv(sys.executable, [sys.executable, *compare])


if __name__ == "__main__":
    main(sys.argv[1:])
