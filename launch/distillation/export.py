"""Writers of trained networks in public layouts: a draft alone, or a policy with its MTP head."""

import shutil
from pathlib import Path

from launch.console import console
from launch.data.hub import checkpoint_directory
from launch.data.tokenizer_files import copy_tokenizer, state_stops
from launch.distillation.acceptance import HeldOutAcceptance
from launch.errors import ConfigError
from launch.setup.adapters import merged_policy
from launch.setup.drafts.base import Draft, PublicLayout
from launch.setup.experiment import Experiment
from launch.setup.networks import Networks
from launch.setup.policy import check_exportable
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig, Dtype
from models.files import read_json
from models.hf.config import carried_fields
from models.hf.eagle3_dialects import Dialect
from models.hf.mtp_files import MTPHead
from models.hf.save import save_policy
from models.params import cast
from specjax.parallel import processes
from specjax.types import Params, PyTree

DRAFT, POLICY = "draft", "policy"


def check_verifier(verifier: str | None, dialect: str) -> None:
    """Raise ConfigError if `verifier` is set for a dialect whose config does not name the policy."""
    if verifier is not None and dialect != "speculators":
        raise ConfigError(f"verifier = {verifier}: allowed only with dialect = speculators")


def check_trained(networks: Networks, dialect: Dialect | None) -> None:
    """Raise ConfigError if the distilled draft, or the policy with its MTP head, cannot be written."""
    draft = networks.draft
    if not draft.in_policy:
        draft.check_writable(dialect)
        return
    if dialect is not None:
        raise ConfigError(f"dialect = {dialect}: allowed only for an EAGLE-3 head, but draft.kind = {draft.kind}")
    assert networks.decoder is not None
    check_exportable(networks.decoder, f"draft.kind = {draft.kind}: its policy")


def write_trained(
    out: Path, experiment: Experiment, draft: Draft, params: Params, dialect: Dialect | None, verifier: str | None
) -> list[Path]:
    """Write the draft and its copy in `dialect`, or the policy with an MTP head. Return the new directories."""
    if draft.in_policy:
        write_policy(out / POLICY, experiment, params, draft.policy_head(params.draft))
        return [out / POLICY]
    draft.write(out / DRAFT, params.draft)
    if dialect is None:
        return [out / DRAFT]
    layout = PublicLayout(dialect, verifier, tables_of_policy(experiment, params))
    draft.write(out / dialect, params.draft, layout)
    return [out / DRAFT, out / dialect]


def tables_of_policy(experiment: Experiment, params: Params) -> PyTree:
    """Return the policy's embedding and vocabulary head, of which some layouts of drafts hold copies."""

    def tables(weights: PyTree) -> PyTree:
        return {name: weights[name] for name in ("embed", "head") if name in weights}

    if not params.base:
        return tables(params.policy)
    both = Params(tables(params.policy), {}, base=tables(params.base))
    return merged_policy(both, experiment.config.model.dtype)[0]


def remove_written(out: Path, dialect: Dialect | None) -> None:
    """Remove complete and incomplete directories that an earlier, stopped process wrote."""

    def remove() -> None:
        for name in (DRAFT, POLICY, *([] if dialect is None else [dialect])):
            for path in (out / name, *out.glob(f".{name}.*")):
                shutil.rmtree(path, ignore_errors=True)

    processes.on_primary(remove)


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


def made_for_distillation(
    policy: str | None, decoder: DecoderConfig | None, measured: HeldOutAcceptance
) -> MadeFor | None:
    """Return the record of the policy that a draft was distilled for, with the predicted acceptance.

    Returns None for a custom family, which made_for.json cannot describe.

    policy:  directory of the policy, or of the run that trained it.
    decoder: shape of the policy; None for a custom family.
    """
    if decoder is None:
        return None
    # At temperature 0 a run predicts acceptance from the distributions at temperature 1, so the two are not comparable.
    predicted = measured.predicted if measured.temperature > 0 else None
    return MadeFor(policy, decoder.hidden_size, decoder.num_layers, measured.temperature, predicted)
