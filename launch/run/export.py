"""Write what a run has trained as files that others load: the policy, or the draft by itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.distillation.export import check_verifier, write_policy
from launch.run.directory import restore_params, restore_policy
from launch.run.records import made_for
from models.checkpoints.made_for import state_made_for
from models.config import Dtype
from models.hf.mtp_files import load_mtp
from models.params import cast
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Options of launch.export alone; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:      Directory of the run.
        checkpoint_step: Its checkpoint: newest, best or a step.
        part:            policy, with its MTP head if that is the draft; or draft.
        dialect:         Layout of an EAGLE-3 head; ours is read by --draft.path.
        verifier:        Name of the policy for speculators' file. None: `checkpoint`.
        param_dtype:     Dtype to write; kept: that of the run.
    """

    checkpoint: str
    checkpoint_step: Which = "newest"
    part: Literal["policy", "draft"] = "policy"
    dialect: Literal["ours", "specforge", "speculators"] = "ours"
    verifier: str | None = None
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"

    def __post_init__(self) -> None:
        if self.part == "policy" and self.dialect != "ours":
            raise ValueError(f"dialect = {self.dialect}: for part draft alone")
        check_verifier(self.verifier, self.dialect)

    @property
    def dtype(self) -> Dtype | None:
        """The dtype to write in, None to keep it."""
        return None if self.param_dtype == "kept" else self.param_dtype


def export(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    """Write the part of the run's save. Raises ConfigError if it cannot be written so."""
    try:
        (_export_draft if args.part == "draft" else _export_policy)(out, experiment, args)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _export_draft(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    draft, run = experiment.networks.draft, Path(args.checkpoint)
    dialect = None if args.dialect == "ours" else args.dialect
    draft.check_writable(dialect)
    params = cast(restore_params(run, experiment, args.checkpoint_step).draft, args.dtype)
    draft.write(out, params, dialect, args.verifier or args.checkpoint)
    state_made_for(out, made_for(run, args.checkpoint_step, experiment.networks.decoder))


def _export_policy(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    run, networks, path, mtp = Path(args.checkpoint), experiment.networks, experiment.config.model.path, None
    if networks.draft.in_policy:
        params = restore_params(run, experiment, args.checkpoint_step)
        policy, mtp = params.policy, networks.draft.policy_head(cast(params.draft, args.dtype))
    else:
        policy = restore_policy(run, experiment, args.checkpoint_step)
        if path is not None and networks.decoder is not None:  # a head that the run did not draft with is kept
            mtp = load_mtp(Path(path), networks.decoder, experiment.mesh, args.dtype)
    write_policy(out, experiment, cast(policy, args.dtype), mtp)
    if networks.draft.in_policy:
        state_made_for(out, made_for(run, args.checkpoint_step, networks.decoder))
