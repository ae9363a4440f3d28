"""Writers of drafts, in our layout or a public one."""

import shutil
from pathlib import Path

from launch.errors import ConfigError
from launch.exports.policy import write_policy
from launch.setup.adapters import merged_policy
from launch.setup.drafts.base import Draft, PublicLayout
from launch.setup.experiment import Experiment
from launch.setup.networks import Networks
from launch.setup.policy import check_exportable
from models.config import Dtype
from models.hf.drafts.dialects import Dialect
from models.params import cast
from specjax.parallel import processes
from specjax.types import Params, PyTree

DRAFT, POLICY = "draft", "policy"


def check_verifier(verifier: str | None, dialect: str) -> None:
    """Raise ConfigError if `verifier` is set for a dialect whose config does not name the policy."""
    if verifier is not None and dialect != "speculators":
        raise ConfigError(f"verifier = {verifier}: allowed only with dialect = speculators")


def write_draft(
    directory: Path,
    experiment: Experiment,
    draft: Draft,
    params: Params,
    dialect: Dialect | None,
    verifier: str | None,
    dtype: Dtype | None = None,
) -> None:
    """Write the draft with the parameters `params.draft` to a new directory. Call `Draft.check_writable` first.

    Raises ValueError if the directory is in use.

    dialect:  None for the layout that --draft.path reads.
    verifier: name or path of the policy that a speculators config states.
    dtype:    dtype to write; None keeps that of the parameters.
    """
    layout = None if dialect is None else PublicLayout(dialect, verifier, _tables_of_policy(experiment, params))
    draft.write(directory, cast(params.draft, dtype), layout)


def _tables_of_policy(experiment: Experiment, params: Params) -> PyTree:
    """Return the policy's embedding and vocabulary head, of which some layouts of drafts hold copies."""

    def tables(weights: PyTree) -> PyTree:
        return {name: weights[name] for name in ("embed", "head") if name in weights}

    if not params.base:
        return tables(params.policy)
    both = Params(tables(params.policy), {}, base=tables(params.base))
    return merged_policy(both, experiment.config.model.dtype)[0]


def check_trained(networks: Networks, dialect: Dialect | None) -> None:
    """Raise ConfigError if the distilled draft, or the policy with its MTP head, cannot be written."""
    draft = networks.draft
    if not draft.in_policy:
        draft.check_writable(dialect)
        return
    if dialect is not None:
        raise ConfigError(
            f"dialect = {dialect}: must be None with draft.kind = {draft.kind}, which is saved with its policy"
        )
    assert networks.decoder is not None
    check_exportable(networks.decoder, f"draft.kind = {draft.kind}: its policy")


def write_trained(
    out: Path, experiment: Experiment, draft: Draft, params: Params, dialect: Dialect | None, verifier: str | None
) -> list[Path]:
    """Write the draft and its copy in `dialect`, or the policy with an MTP head. Return the new directories."""
    if draft.in_policy:
        write_policy(out / POLICY, experiment, params, draft.policy_head(params.draft))
        return [out / POLICY]
    written = {DRAFT: None} if dialect is None else {DRAFT: None, dialect: dialect}
    for name, layout in written.items():
        write_draft(out / name, experiment, draft, params, layout, verifier)
    return [out / name for name in written]


def remove_written(out: Path, dialect: Dialect | None) -> None:
    """Remove complete and incomplete directories that an earlier, stopped process wrote."""

    def remove() -> None:
        for name in (DRAFT, POLICY, *([] if dialect is None else [dialect])):
            for path in (out / name, *out.glob(f".{name}.*")):
                shutil.rmtree(path, ignore_errors=True)

    processes.on_primary(remove)
