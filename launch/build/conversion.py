"""Conversion of policies and drafts between public layouts and ours, in both directions.

A policy in our layout is `config.json` (the decoder's shape), `params/` (Orbax) and, if the policy has an MTP head,
`mtp/`. Tokenizer files are copied. Fields of Hugging Face's `config.json` that the decoder does not use, mostly token
ids, are kept in `huggingface.json` and written back.

A draft is an EAGLE-3 head in the layout of SafeAILab, SpecForge or speculators. Its complete `config.json` is kept in
`huggingface.json`. Its vocabulary maps and its copy of the embedding, if it has them, are kept in
`huggingface.safetensors`. So it can be written back unchanged.

`made_for.json` is copied. It states which policy a draft or a head was made for.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from launch.build.decoder_config import read_decoder
from launch.data.hub import checkpoint_directory
from launch.data.tokenizers import copy_tokenizer
from models.checkpoints.draft import load_draft_checkpoint, save_draft_checkpoint
from models.checkpoints.made_for import read_made_for, state_made_for
from models.checkpoints.policy import load_policy_checkpoint, save_policy_checkpoint
from models.config import Dtype
from models.files import CARRIED, new_directory, read_json, write_json
from models.hf.config import carried_fields
from models.hf.eagle3_dialects import dialect_of, stating_dtype
from models.hf.eagle3_files import carried_tensors, load_eagle3, save_eagle3, write_carried
from models.hf.load import load_policy
from models.hf.mtp_files import load_mtp, save_mtp
from models.hf.save import save_policy
from models.params import cast
from specjax.options import NonNegative, Options, at_least, at_most
from specjax.parallel.mesh import MeshConfig, make_mesh


@dataclass(frozen=True)
class ConvertArgs(Options):
    """Convert a policy or an EAGLE-3 draft between its public layout and ours. The layout of SOURCE sets the direction.

    Attributes:
        source:         Policy or draft to read: a directory, or a name on the hub, org/name[@revision].
        out:            New or empty directory to write into.
        feature_layers: Policy to our layout: layers whose input the draft reads. Default: 2, L//2 and L-3.
        param_dtype:    Dtype to convert parameters to. kept: no conversion.
        max_file_bytes: Policy to Hugging Face: maximum size of one safetensors file.
        dialect:        Draft from our layout: dialect to write. SGLang reads specforge, vLLM reads both.
        verifier:       Draft to speculators: name or path of its policy, stated in the file.
    """

    source: Path
    out: Path
    feature_layers: tuple[NonNegative, ...] | None = None
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"
    max_file_bytes: Annotated[int, at_least(1), at_most(2**63 - 1)] = 5_000_000_000
    dialect: Literal["unsaid", "specforge", "speculators"] = "unsaid"
    verifier: str | None = None

    @property
    def dtype(self) -> Dtype | None:
        """Dtype to convert parameters to; None: no conversion."""
        return None if self.param_dtype == "kept" else self.param_dtype


def convert(args: ConvertArgs) -> str:
    """Convert the source to the other layout. Return the name of that layout.

    The source's `config.json` shows which layout it has. Raises ValueError, OSError or ImportError if an option, the
    source or the output directory cannot be used.
    """
    args = dataclasses.replace(args, source=checkpoint_directory("source", args.source))
    fields = read_json(args.source / "config.json")
    if "kind" in fields:
        run, layout = export_draft, "public draft"
    elif dialect_of(fields):
        run, layout = import_draft, "our draft"
    elif "model_type" in fields:
        run, layout = import_policy, "our"
    else:
        run, layout = export_policy, "Hugging Face"
    for name, (conversion, source) in _ONLY_FOR.items():
        value, default = getattr(args, name), ConvertArgs.__dataclass_fields__[name].default
        if run is not conversion and value != default:
            raise ValueError(f"{name} = {value}: allowed only with {source} as SOURCE")
    run(args)
    return layout


def import_policy(args: ConvertArgs) -> None:
    """Convert a policy, with its MTP head if it has one, from Hugging Face's layout to ours."""
    config = read_decoder(args.source, args.feature_layers, f"source = {args.source}")
    mesh = make_mesh(MeshConfig())
    with new_directory(args.out) as out:
        params = load_policy(args.source, config, mesh, args.dtype)
        head = load_mtp(args.source, config, mesh, args.dtype)
        if args.dtype:
            config = dataclasses.replace(config, param_dtype=args.dtype)
        save_policy_checkpoint(out, params, config)
        if head:
            save_mtp(out, head)
        write_json(out / CARRIED, public_config(args.source) or {})
        _copy_extra_files(args.source, out)


def export_policy(args: ConvertArgs) -> None:
    """Convert a policy, with its MTP head if it has one, from our layout to Hugging Face's."""
    with new_directory(args.out) as out:
        mesh = make_mesh(MeshConfig())
        config, params = load_policy_checkpoint(args.source, mesh)
        head = load_mtp(args.source, config, mesh, args.dtype)
        save_policy(out, cast(params, args.dtype), config, public_config(args.source), args.max_file_bytes, head)
        _copy_extra_files(args.source, out)


def import_draft(args: ConvertArgs) -> None:
    """Convert an EAGLE-3 head from a public dialect to our layout."""
    with new_directory(args.out) as out:
        config, params, ids, layers = load_eagle3(args.source, make_mesh(MeshConfig()), args.dtype)
        fields = read_json(args.source / "config.json")
        if args.dtype:
            config = dataclasses.replace(config, param_dtype=args.dtype)
            fields = stating_dtype(fields, args.dtype)
        save_draft_checkpoint(out, params, config, ids, layers)
        write_json(out / CARRIED, fields)
        write_carried(out, carried_tensors(args.source, args.dtype) or {})
        state_made_for(out, read_made_for(args.source))


def export_draft(args: ConvertArgs) -> None:
    """Convert an EAGLE-3 head from our layout to the dialect of `args.dialect`."""
    if args.dialect == "unsaid":
        raise ValueError("dialect = unsaid: must be specforge or speculators for a draft")
    if args.verifier is not None and args.dialect != "speculators":
        raise ValueError(f"verifier = {args.verifier}: allowed only with dialect speculators")
    draft = load_draft_checkpoint(args.source, make_mesh(MeshConfig()))
    draft = draft._replace(params=cast(draft.params, args.dtype))
    fields = public_config(args.source)
    if fields is not None and args.dtype is not None:
        fields = stating_dtype(fields, args.dtype)
    if fields is not None and args.verifier is not None:
        speculators = fields.get("speculators_config") or {}
        verifier = (speculators.get("verifier") or {}) | {"name_or_path": args.verifier}
        fields = fields | {"speculators_config": speculators | {"verifier": verifier}}
    save_eagle3(args.out, draft, args.dialect, fields, carried_tensors(args.source, args.dtype), args.verifier)
    state_made_for(args.out, read_made_for(args.source))


def public_config(source: Path) -> dict[str, Any] | None:
    """Return the fields of the public `config.json` that do not affect the forward; None if `source` has none.

    source: a policy in either layout, or a draft in ours. For a draft, all fields of its public `config.json`.
    """
    if (source / "params").is_dir():
        return read_json(source / CARRIED) if (source / CARRIED).exists() else None
    return carried_fields(read_json(source / "config.json"))


def _copy_extra_files(source: Path, out: Path) -> None:
    """Copy `made_for.json` and the tokenizer files that `source` has."""
    state_made_for(out, read_made_for(source))
    copy_tokenizer(source, out)


# Option -> the only conversion that accepts it, and the name of its SOURCE for the error message.
_ONLY_FOR: dict[str, tuple[Callable[[ConvertArgs], None], str]] = {
    "feature_layers": (import_policy, "a policy in Hugging Face's layout"),
    "max_file_bytes": (export_policy, "a policy in our layout"),
    "dialect": (export_draft, "a draft in our layout"),
    "verifier": (export_draft, "a draft in our layout"),
}
