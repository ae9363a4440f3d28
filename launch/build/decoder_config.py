"""Reader of decoder configs in Hugging Face layout, corrected by the stored tensors."""

from dataclasses import replace
from pathlib import Path

from launch.cli.console import console
from models.config import DecoderConfig
from models.hf.config import read_hf_config
from models.hf.load import has_own_head


def read_decoder(directory: Path, feature_layers: tuple[int, ...] | None, owner: str) -> DecoderConfig:
    """Return `read_hf_config`, but untied if the stored head differs from the embedding. Prints a line in that case.

    owner: the option that names the directory, with its value.
    """
    config = read_hf_config(directory, feature_layers)
    if not config.tie_embeddings or not has_own_head(directory):
        return config
    console.print(
        f"{owner}: tie_word_embeddings = true, but the stored lm_head.weight differs from the embedding: loaded untied"
    )
    return replace(config, tie_embeddings=False)
