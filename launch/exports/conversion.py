"""Conversion of EAGLE-3 heads and block drafts between public dialects and our layout, in both directions.

The complete public `config.json` is kept in `huggingface.json`. The vocabulary maps and copies of the policy's tables,
if the draft has them, are kept in `huggingface.safetensors`. So it can be written back unchanged.

`made_for.json`, which states the policy that a draft was made for, is copied.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.data.hub import checkpoint_directory
from models.checkpoints.draft import load_draft_checkpoint, save_draft_checkpoint
from models.checkpoints.made_for import read_made_for, state_made_for
from models.config import Dtype
from models.drafts.block import BlockConfig
from models.files import CARRIED, new_directory, read_json, write_json
from models.hf.config import refuse_earlier_layout
from models.hf.drafts.carried import carried_tensors, copied_tables, write_carried
from models.hf.drafts.dialects import dialect_of
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.stated_policy import StatedPolicy
from models.hf.drafts.writer import save_public_draft, stating_dtype
from models.params import cast
from specjax.options import Options
from specjax.parallel.mesh import MeshConfig, make_mesh


@dataclass(frozen=True)
class ConvertArgs(Options):
    """Convert a draft between a public dialect and our layout. The layout of SOURCE sets the direction.

    Attributes:
        source:      EAGLE-3 head or block draft to read: a directory, or a name on the hub, org/name[@revision].
        out:         New or empty directory to write into.
        param_dtype: Dtype to convert parameters to. kept: no conversion.
        dialect:     From our layout: dialect to write. A head has specforge, a block draft zlab or deepspec, both
                     speculators. SGLang reads specforge, vLLM reads both of a head's.
        verifier:    To speculators: name or path of the draft's policy, stated in the file.
    """

    source: Path
    out: Path
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"
    dialect: Literal["unsaid", "specforge", "speculators", "zlab", "deepspec"] = "unsaid"
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
        export_draft(args)
        return "public draft"
    if dialect_of(fields) is None:
        refuse_earlier_layout(args.source, fields)
        raise ValueError(
            f"source = {args.source}: must hold an EAGLE-3 head or a block draft; a policy is read (--model.path) and "
            "written (launch.export) in Hugging Face's layout, without conversion"
        )
    import_draft(args)
    return "our draft"


def import_draft(args: ConvertArgs) -> None:
    """Convert a draft from a public dialect to our layout."""
    for name, value, default in (("dialect", args.dialect, "unsaid"), ("verifier", args.verifier, None)):
        if value != default:
            raise ValueError(f"{name} = {value}: allowed only with a draft in our layout as SOURCE")
    with new_directory(args.out) as out:
        fields = read_json(args.source / "config.json")
        config, params, ids, layers = load_public_draft(args.source, make_mesh(MeshConfig()), args.dtype)
        if args.dtype:
            config = dataclasses.replace(config, param_dtype=args.dtype)
            fields = stating_dtype(fields, args.dtype)
        save_draft_checkpoint(out, params, config, ids, layers)
        write_json(out / CARRIED, fields)
        write_carried(out, carried_tensors(args.source, args.dtype, copied_tables(config)) or {})
        state_made_for(out, read_made_for(args.source))


def export_draft(args: ConvertArgs) -> None:
    """Convert a draft from our layout to the dialect of `args.dialect`."""
    if args.dialect == "unsaid":
        raise ValueError("dialect = unsaid: must be specforge, speculators, zlab or deepspec for a draft")
    if args.verifier is not None and args.dialect != "speculators":
        raise ValueError(f"verifier = {args.verifier}: allowed only with dialect speculators")
    draft, made_for = load_draft_checkpoint(args.source, make_mesh(MeshConfig())), read_made_for(args.source)
    draft = draft._replace(params=cast(draft.params, args.dtype))
    source = args.source / CARRIED
    fields: dict[str, Any] | None = read_json(source) if source.exists() else None
    if fields is not None and args.dtype is not None:
        fields = stating_dtype(fields, args.dtype)
    if fields is not None and args.verifier is not None:
        speculators = fields.get("speculators_config") or {}
        verifier = (speculators.get("verifier") or {}) | {"name_or_path": args.verifier}
        fields = fields | {"speculators_config": speculators | {"verifier": verifier}}
    policy = StatedPolicy(args.verifier, (fields or {}).get("num_target_layers"))
    if made_for is not None:
        name = made_for.policy if isinstance(draft.config, BlockConfig) else None
        policy = StatedPolicy(args.verifier or name, made_for.num_layers)
    carried = carried_tensors(args.source, args.dtype, copied_tables(draft.config))
    save_public_draft(args.out, draft, args.dialect, policy, fields, carried)
    state_made_for(args.out, made_for)
