"""Reading of torch's own tensor files, through views with the methods of safetensors' lazy views. Needs torch."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.files import check_file, one_line_errors, optional
from models.hf.load import SINGLE, follows_from_config


@dataclass(frozen=True)
class TorchView:
    """Tensor in memory with the methods of a safetensors view. `dtypes` maps safetensors' names to dtypes."""

    tensor: np.ndarray
    dtypes: Mapping[str, np.dtype]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        names = {dtype: name for name, dtype in self.dtypes.items()}
        return names.get(self.tensor.dtype, self.tensor.dtype.name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.tensor[index]


def torch_views(path: Path, dtypes: Mapping[str, np.dtype]) -> dict[str, TorchView]:
    """Return the tensors of a `pytorch_model.bin` by name, except those for which `follows_from_config` is true.

    Raises a one-line ImportError if torch is not installed, ValueError if the file is not a file of tensors.
    """
    check_file(path)
    try:
        torch = optional("torch")
    except ImportError as error:
        raise ImportError(
            f"{path}: needs torch, which is not installed; install it, or convert the file to {SINGLE}"
        ) from error

    def array(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    with one_line_errors(f"{path}: not a file of tensors, or cut short"):
        # Map zip files, the only kind that torch can map: then opening the file again does not read it again.
        tensors = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        weights = {name: tensor for name, tensor in tensors.items() if not follows_from_config(name)}
        return {name: TorchView(array(tensor), dtypes) for name, tensor in weights.items()}
