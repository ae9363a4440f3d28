"""Torch's own files of tensors, with the methods of safetensors' lazy views. Torch alone reads them."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.files import one_line_errors, optional
from models.hf.load import SINGLE, follows_from_config


@dataclass(frozen=True)
class View:
    """A tensor in memory. dtypes: by safetensors' names."""

    tensor: np.ndarray
    dtypes: Mapping[str, np.dtype]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        names = {dtype: name for name, dtype in self.dtypes.items()}
        return names.get(self.tensor.dtype, self.tensor.dtype.name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.tensor[index]


def torch_views(path: Path, dtypes: Mapping[str, np.dtype]) -> dict[str, View]:
    """The tensors of a `pytorch_model.bin` by name, but for those that follow from the config.

    Raises ImportError with one line where torch is not installed, ValueError where the file holds no tensors.
    """
    try:
        torch = optional("torch")
    except ImportError as error:
        raise ImportError(f"{path}: torch is not installed, which alone reads it; or convert it to {SINGLE}") from error

    def array(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    with one_line_errors(f"{path}: not a file of tensors, or cut short"):
        # Mapped where the file is of the kind that can be: then it is read once, whatever the times it is opened.
        tensors = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        kept = {name: tensor for name, tensor in tensors.items() if not follows_from_config(name)}
        return {name: View(array(tensor), dtypes) for name, tensor in kept.items()}
