"""Policies between Hugging Face's layout and ours: `python -m launch.convert SOURCE OUT`.

Ours is `config.json` (the decoder's shape), `params/` (Orbax) and, where the policy has an MTP head, `mtp/`. Tokenizer
files travel along both ways, and so do the fields of Hugging Face's `config.json` that the decoder has no use for,
token ids above all, in `huggingface.json`.
"""

import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import tyro

from launch.cli import parse, run_program
from launch.errors import ConfigError
from models.files import new_directory, read_json, write_json
from models.hf_config import carried_fields, read_hf_config
from models.hf_export import save_policy
from models.hf_import import load_policy
from models.mtp_files import load_mtp, save_mtp
from models.policy_checkpoint import load_policy_checkpoint, save_policy_checkpoint
from specjax.mesh import MeshConfig, make_mesh

CARRIED = "huggingface.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class ConvertArgs:
    """Convert a policy from Hugging Face's layout to ours, or back: whichever SOURCE is not."""

    source: tyro.conf.Positional[Path]
    """The policy to read."""
    out: tyro.conf.Positional[Path]
    """The directory to write; new or empty."""
    feature_layers: tuple[int, ...] | None = None
    """To ours: the layers on whose entry the drafter reads; EAGLE-3's 2, L/2 and L-3 by default."""
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"
    """To ours: the dtype to convert parameters to."""
    max_file_bytes: int = 5_000_000_000
    """To Hugging Face: beyond it the safetensors are split over several files."""


def import_policy(args: ConvertArgs) -> None:
    """From Hugging Face's layout to ours."""
    dtype = None if args.param_dtype == "kept" else args.param_dtype
    config, mesh = read_hf_config(args.source, args.feature_layers), make_mesh(MeshConfig())
    with new_directory(args.out) as out:
        params = load_policy(args.source, config, mesh, dtype)
        head = load_mtp(args.source, config, mesh, dtype)
        if dtype:
            config = dataclasses.replace(config, param_dtype=dtype)
        save_policy_checkpoint(out, params, config)
        if head:
            save_mtp(out, head)
        write_json(out / CARRIED, carried_fields(read_json(args.source / "config.json")))
        _copy_tokenizer(args.source, out)


def export_policy(args: ConvertArgs) -> None:
    """From our layout to Hugging Face's."""
    with new_directory(args.out) as out:
        mesh = make_mesh(MeshConfig())
        config, params = load_policy_checkpoint(args.source, mesh)
        carried = read_json(args.source / CARRIED) if (args.source / CARRIED).exists() else None
        save_policy(out, params, config, carried, args.max_file_bytes, load_mtp(args.source, config, mesh))
        _copy_tokenizer(args.source, out)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def main(argv: list[str]) -> int:
    """Raises ConfigError for whatever is wrong with the arguments, the source or the place to write to."""
    args = parse(ConvertArgs, argv, "python -m launch.convert")
    # Bytes are copied and nothing is computed: the policy need not fit an accelerator.
    jax.config.update("jax_platforms", "cpu")
    try:
        huggingface = "model_type" in read_json(args.source / "config.json")
        (import_policy if huggingface else export_policy)(args)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    print(f"{args.source} -> {args.out} ({'our' if huggingface else 'Hugging Face'} layout)")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
