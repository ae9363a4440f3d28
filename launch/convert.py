"""Policies and drafts between public layouts and ours: `python -m launch.convert SOURCE OUT`.

Of a policy, ours is `config.json` (the decoder's shape), `params/` (Orbax) and, where the policy has an MTP head,
`mtp/`. Tokenizer files travel along both ways, and so do the fields of Hugging Face's `config.json` that the decoder
has no use for, token ids above all, in `huggingface.json`.

A draft is an EAGLE-3 head as SafeAILab, SpecForge or speculators publish them. Its whole `config.json` travels along,
and in `huggingface.safetensors` the maps of its vocabulary and a copy of the embedding where there are any, so that it
comes back as it was. So does `made_for.json`, what a draft or a policy with a head was made for.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from launch.cli.errors import ConfigError
from launch.cli.options import parse, run_program
from launch.data.tokenizers import copy_tokenizer
from models.checkpoints.draft import load_draft_checkpoint, save_draft_checkpoint
from models.checkpoints.made_for import read_made_for, state_made_for
from models.checkpoints.policy import load_policy_checkpoint, save_policy_checkpoint
from models.files import CARRIED, new_directory, read_json, write_json
from models.hf.config import carried_fields, read_hf_config
from models.hf.eagle3_dialects import dialect_of, stating_dtype
from models.hf.eagle3_files import carried_tensors, load_eagle3, save_eagle3, write_carried
from models.hf.load import load_policy
from models.hf.mtp_files import load_mtp, save_mtp
from models.hf.save import save_policy
from models.params import cast
from specjax.parallel.mesh import MeshConfig, make_mesh


@dataclass(frozen=True)
class ConvertArgs:
    """Convert a policy or an EAGLE-3 draft from its public layout to ours, or back: whichever SOURCE is not."""

    source: tyro.conf.Positional[Path]
    """The policy or draft to read."""
    out: tyro.conf.Positional[Path]
    """The directory to write; new or empty."""
    feature_layers: tuple[int, ...] | None = None
    """A policy to ours: the layers on whose entry the drafter reads; EAGLE-3's 2, L/2 and L-3 by default."""
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"
    """The dtype to convert parameters to."""
    max_file_bytes: int = 5_000_000_000
    """A policy to Hugging Face: beyond it the safetensors are split over several files."""
    dialect: Literal["unsaid", "specforge", "speculators"] = "unsaid"
    """A draft from ours: whose layout to write. SGLang reads specforge, vLLM both."""
    verifier: str | None = None
    """A draft to speculators: the name or path of its policy, for the file to state."""


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
        state_made_for(out, read_made_for(args.source))
        write_json(out / CARRIED, carried_fields(read_json(args.source / "config.json")))
        copy_tokenizer(args.source, out)


def export_policy(args: ConvertArgs) -> None:
    """From our layout to Hugging Face's."""
    dtype = None if args.param_dtype == "kept" else args.param_dtype
    with new_directory(args.out) as out:
        mesh = make_mesh(MeshConfig())
        config, params = load_policy_checkpoint(args.source, mesh)
        params = cast(params, dtype)
        carried = read_json(args.source / CARRIED) if (args.source / CARRIED).exists() else None
        save_policy(out, params, config, carried, args.max_file_bytes, load_mtp(args.source, config, mesh, dtype))
        state_made_for(out, read_made_for(args.source))
        copy_tokenizer(args.source, out)


def import_draft(args: ConvertArgs) -> None:
    """From a public dialect to ours."""
    dtype = None if args.param_dtype == "kept" else args.param_dtype
    with new_directory(args.out) as out:
        config, params, ids, layers = load_eagle3(args.source, make_mesh(MeshConfig()), dtype)
        if dtype:
            config = dataclasses.replace(config, param_dtype=dtype)
        save_draft_checkpoint(out, params, config, ids, layers)
        fields = read_json(args.source / "config.json")
        write_json(out / CARRIED, stating_dtype(fields, dtype) if dtype else fields)
        write_carried(out, carried_tensors(args.source, dtype) or {})
        state_made_for(out, read_made_for(args.source))


def export_draft(args: ConvertArgs) -> None:
    """From ours to a public dialect."""
    if args.dialect == "unsaid":
        raise ValueError("dialect = unsaid: must be specforge or speculators for a draft")
    if args.verifier is not None and args.dialect != "speculators":
        raise ValueError(f"verifier = {args.verifier}: for dialect speculators alone")
    dtype = None if args.param_dtype == "kept" else args.param_dtype
    draft = load_draft_checkpoint(args.source, make_mesh(MeshConfig()))
    draft = draft._replace(params=cast(draft.params, dtype))
    fields = read_json(args.source / CARRIED) if (args.source / CARRIED).exists() else None
    if dtype is not None and fields is not None:
        fields = stating_dtype(fields, dtype)
    if args.verifier is not None and fields is not None:
        stated = fields.get("speculators_config") or {}
        verifier = (stated.get("verifier") or {}) | {"name_or_path": args.verifier}
        fields = fields | {"speculators_config": stated | {"verifier": verifier}}
    save_eagle3(args.out, draft, args.dialect, fields, carried_tensors(args.source, dtype), args.verifier)
    state_made_for(args.out, read_made_for(args.source))


# Options that are for one conversion alone.
_ALONE: dict[str, tuple[Callable[[ConvertArgs], None], str]] = {
    "feature_layers": (import_policy, "a policy to our layout"),
    "max_file_bytes": (export_policy, "a policy of ours"),
    "dialect": (export_draft, "a draft of ours"),
    "verifier": (export_draft, "a draft of ours"),
}


def _check_options(args: ConvertArgs, convert: Callable[[ConvertArgs], None]) -> None:
    for field in dataclasses.fields(args):
        value, (meant, of) = getattr(args, field.name), _ALONE.get(field.name, (convert, ""))
        if convert is not meant and value != field.default:
            raise ValueError(f"{field.name} = {value}: for {of} alone")


def _conversion(fields: Mapping[str, Any]) -> tuple[Callable[[ConvertArgs], None], str]:
    """What is to be done with a source of this config.json, and the layout that it comes out in."""
    if "kind" in fields:
        return export_draft, "public draft"
    if dialect_of(fields):
        return import_draft, "our draft"
    return (import_policy, "our") if "model_type" in fields else (export_policy, "Hugging Face")


def main(argv: list[str]) -> int:
    """Raises ConfigError for whatever is wrong with the arguments, the source or the place to write to."""
    args = parse(ConvertArgs, argv, "python -m launch.convert")
    # Bytes are copied and nothing is computed: the networks need not fit an accelerator.
    jax.config.update("jax_platforms", "cpu")
    try:
        convert, layout = _conversion(read_json(args.source / "config.json"))
        _check_options(args, convert)
        convert(args)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    print(f"{args.source} -> {args.out} ({layout} layout)")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
