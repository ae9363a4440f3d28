"""Writer of a policy in Hugging Face layout, with its tokenizer."""

from pathlib import Path

from launch.console import console
from launch.data.hub import checkpoint_directory
from launch.data.tokenizer_files import copy_tokenizer, state_stops
from launch.errors import ConfigError
from launch.setup.adapters import merged_policy
from launch.setup.experiment import Experiment
from models.config import Dtype
from models.files import read_json
from models.hf.config import carried_fields
from models.hf.drafts.mtp import MTPHead
from models.hf.save import save_policy
from models.params import cast
from specjax.parallel import processes
from specjax.types import Params


def write_policy(
    directory: Path, experiment: Experiment, params: Params, mtp: MTPHead | None, dtype: Dtype | None = None
) -> None:
    """Write a policy in Hugging Face layout, with its tokenizer and what ends a completion in the run.

    Fields of model.path's config.json that do not describe the network's shape are kept. Adapters are added to their
    kernels; a line says how many of the updates are too small for the dtype.

    Raises ConfigError for a custom family, and ValueError if the directory is in use or the family is unknown there.

    mtp:   MTP head to include, under the weight names of its family.
    dtype: dtype to write the policy in; None keeps that of `params`.
    """
    model, decoder = experiment.config.model, experiment.networks.decoder
    if decoder is None:
        raise ConfigError(f"model.family = {model.family}: has no Hugging Face layout; must be a built-in family")
    source = None if model.path is None else checkpoint_directory("model.path", model.path)
    carried = None if source is None else carried_fields(read_json(source / "config.json"))
    if params.base:
        policy, lost = merged_policy(params, dtype or model.dtype)
        console.print(
            f"adapters merged in float32, rounded once: {lost:.2%} of the elements of adapted kernels stay as in the "
            "base, their update being too small for the dtype written; "
            "--param-dtype float32 or --part adapters keeps it"
        )
    else:
        policy = cast(params.policy, dtype)
    save_policy(directory, policy, decoder, carried, mtp=mtp)
    if source is not None:
        copy_tokenizer(source, directory)
    tokenizer = experiment.tokenizer
    processes.on_primary(lambda: state_stops(directory, tokenizer.stop_tokens, tokenizer.stop_strings))
