"""Registry of draft builders, by draft.kind."""

from collections.abc import Callable
from dataclasses import replace

from configs.schema import KINDS, RunConfig, kind_of
from launch.cli.functions import load_function, refusing_errors
from launch.console import console
from launch.data.hub import checkpoint_directory
from launch.errors import ConfigError
from launch.setup.drafts.base import Draft, DraftContext
from launch.setup.drafts.block import BlockDraft
from launch.setup.drafts.eagle3 import Eagle3Draft
from launch.setup.drafts.model import build_model
from launch.setup.drafts.mtp import build_mtp
from models.checkpoints.draft import load_named_draft
from models.checkpoints.made_for import MadeFor, read_made_for
from models.params import replicate
from specjax.drafters import NoDrafter

DraftBuilder = Callable[[DraftContext], Draft]

BUILDERS: dict[str, DraftBuilder] = {
    "eagle3": Eagle3Draft.build,
    "dflash": BlockDraft.build,
    "dspark": BlockDraft.build,
    "mtp": build_mtp,
    "model": build_model,
    "none": lambda context: Draft(NoDrafter()),
}


def build_draft(context: DraftContext) -> Draft:
    """Build the draft that `context.config` names, with a built-in builder or the user's function.

    Raises ValueError if a checkpoint cannot be read or does not fit the policy.
    """
    kind = context.config.draft.kind
    if context.decoder is None and not kind_of(kind).any_policy:
        allowed = ", ".join(name for name, each in KINDS.items() if each.any_policy)
        raise ConfigError(f"draft.kind = {kind}: must be {allowed} or package.module:name with model.family")
    draft = BUILDERS[kind](context) if kind in BUILDERS else _build_custom(context)
    draft = replace(draft, kind=kind)
    # Before it is trained. Shapes are not.
    if draft.read_from is None and context.key is not None:
        if (line := draft.only_ours()) is not None:
            console.print(line)
    return replace(draft, made_for=read_stated_policy(draft, context.config))


def _build_custom(context: DraftContext) -> Draft:
    """Build the draft with the user's function. If draft.path is set, load the weights from there."""
    kind, path = context.config.draft.kind, context.config.draft.path
    if context.key is None:
        raise ConfigError(f"draft.kind = {kind}: must be {', '.join(BUILDERS)} for a plan")
    build = load_function("draft.kind", kind, BUILDERS)
    with refusing_errors("draft.kind", kind, "take a DraftContext, and return a Draft"):
        draft = build(context)
    if not isinstance(draft, Draft):
        raise ConfigError(f"draft.kind = {kind}: returned {type(draft).__name__}; must return a Draft")
    draft = replace(draft, params=replicate(draft.params, context.mesh))
    if path is None:
        return draft
    directory = checkpoint_directory("draft.path", path)
    return replace(draft, params=load_named_draft(directory, kind, draft.params), read_from="draft.path")


def read_stated_policy(draft: Draft, config: RunConfig) -> MadeFor | None:
    """Return the content of `made_for.json` in the draft's directory; None if there is no such file.

    Raises ValueError if the file is malformed, or if its hidden size differs from the policy's.
    """
    path = {"draft.path": config.draft.path, "model.path": config.model.path}.get(str(draft.read_from))
    made_for = None if path is None else read_made_for(checkpoint_directory(str(draft.read_from), path))
    if made_for is not None and draft.policy_width not in (None, made_for.hidden_size):
        raise ValueError(
            f"{draft.read_from} = {path}: its made_for.json states hidden_size = {made_for.hidden_size}; must be "
            f"{draft.policy_width}, the policy's"
        )
    return made_for
