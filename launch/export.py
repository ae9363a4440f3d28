"""What a run has trained, for others to load: `python -m launch.export CONFIG --checkpoint RUN --out DIR`.

CONFIG and the options behind it are those of the run, of which a save is written: the policy in Hugging Face's layout
with its tokenizer, an MTP head stitched in under the names of its family; or the draft by itself.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from launch.build.experiment import Experiment, build_experiment
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run_and, run_program
from launch.cli.paths import new_output_directory
from launch.distillation.export import check_draft, check_verifier, write_draft, write_policy
from launch.run.directory import restore_params, restore_policy
from launch.run.records import made_for
from models.checkpoints.made_for import state_made_for
from models.drafts.mtp import MTPConfig
from models.hf.mtp_files import load_mtp
from models.params import cast
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Options of launch.export alone; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:      the directory of the run.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        part:            policy, with an MTP head where that is the draft; or draft, an EAGLE-3 head or a small model.
        dialect:         of an EAGLE-3 head: ours, which draft.path reads, or that of SpecForge or speculators.
        verifier:        the policy's name, as the serving engine knows it, for speculators' file to state; None states
                         `checkpoint`.
        param_dtype:     to write parameters in; kept leaves them in model.param_dtype, that of training.
    """

    checkpoint: str
    checkpoint_step: Which = "newest"
    part: Literal["policy", "draft"] = "policy"
    dialect: Literal["ours", "specforge", "speculators"] = "ours"
    verifier: str | None = None
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"


def main(argv: list[str]) -> int:
    """Restore, write, and say where."""
    config, own = parse_run_and(ExportArgs, argv, "python -m launch.export", "Write what a run has trained.")
    out = new_output_directory(config)
    if own.part == "policy" and own.dialect != "ours":
        raise ConfigError(f"dialect = {own.dialect}: for part draft alone")
    check_verifier(own.verifier, own.dialect)
    experiment = build_experiment(config, training=False)
    try:
        (_export_draft if own.part == "draft" else _export_policy)(out, experiment, own)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    print(f"{own.checkpoint} -> {out} ({own.part})")
    return 0


def _export_draft(out: Path, experiment: Experiment, own: ExportArgs) -> None:
    config, ids = experiment.config, experiment.draft_vocabulary
    dialect = None if own.dialect == "ours" else own.dialect
    check_draft(experiment.networks, config.draft.kind, dialect)
    dtype = None if own.param_dtype == "kept" else own.param_dtype
    draft = cast(restore_params(Path(own.checkpoint), experiment, own.checkpoint_step).draft, dtype)
    networks, head = experiment.networks, experiment.networks.head
    if head is not None and dtype is not None:
        networks = replace(networks, head=replace(head, param_dtype=dtype))
    target_ids = None if ids is None else np.array(ids, np.int32)
    write_draft(out, networks, draft, target_ids, dialect, own.verifier or own.checkpoint)
    state_made_for(out, made_for(Path(own.checkpoint), own.checkpoint_step, networks.decoder))


def _export_policy(out: Path, experiment: Experiment, own: ExportArgs) -> None:
    networks, path, mtp = experiment.networks, experiment.config.model.path, None
    dtype = None if own.param_dtype == "kept" else own.param_dtype
    if isinstance(networks.head, MTPConfig):
        params = restore_params(Path(own.checkpoint), experiment, own.checkpoint_step)
        policy, mtp = params.policy, (networks.head, cast(params.draft, dtype))
    else:
        policy = restore_policy(Path(own.checkpoint), experiment, own.checkpoint_step)
        if path is not None:  # a head that the run has not drafted with stays as it came
            mtp = load_mtp(Path(path), networks.decoder, experiment.mesh, dtype)
    write_policy(out, networks.decoder, cast(policy, dtype), path, mtp)
    if isinstance(networks.head, MTPConfig):
        state_made_for(out, made_for(Path(own.checkpoint), own.checkpoint_step, networks.decoder))


if __name__ == "__main__":
    raise SystemExit(run_program(main))
