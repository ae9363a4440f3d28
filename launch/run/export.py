"""Export a run's policy, or only its draft or its adapters, in public layouts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from configs.override import flat
from configs.schema import LoraConfig
from launch.cli.paths import CONFIG_FILE, check_checkpoint
from launch.console import console
from launch.data.hub import checkpoint_directory, hub_name
from launch.errors import ConfigError
from launch.exports.draft import check_verifier, write_draft
from launch.exports.policy import write_policy
from launch.run.history import METRICS_FILE, matches_schema
from launch.run.networks import restore_params, restore_policy, saved_step
from launch.run.records import check_same, read_recorded, read_run
from launch.setup.adapters import base_of, layers_of
from launch.setup.experiment import Experiment
from models.checkpoints.made_for import MadeFor, state_made_for
from models.config import DecoderConfig, Dtype
from models.hf.config import read_hf_config
from models.hf.drafts.mtp import load_mtp
from models.hf.peft_files import save_adapters
from models.params import cast
from specjax.checkpoint import Which
from specjax.options import Options


@dataclass(frozen=True, kw_only=True)
class ExportArgs(Options):
    """Options that only launch.export has; its --out is the directory to write, new or empty.

    Attributes:
        checkpoint:      Directory of the run.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        part:            policy (includes an MTP head; adapters are merged), draft, or adapters (PEFT's files).
        dialect:         Layout of the draft: an EAGLE-3 head has specforge, a block draft zlab or deepspec, both
                         speculators.
        verifier:        Policy name to write in a speculators config. None: `checkpoint`.
        param_dtype:     Dtype to write; kept: the run's dtype.
    """

    checkpoint: str
    checkpoint_step: Which = "newest"
    part: Literal["policy", "draft", "adapters"] = "policy"
    dialect: Literal["ours", "specforge", "speculators", "zlab", "deepspec"] = "ours"
    verifier: str | None = None
    param_dtype: Literal["kept", "float32", "bfloat16"] = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part != "draft" and self.dialect != "ours":
            raise ValueError(f"dialect = {self.dialect}: allowed only with part = draft")
        check_verifier(self.verifier, self.dialect)
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    @property
    def dtype(self) -> Dtype | None:
        """The dtype to write; None keeps the run's."""
        return None if self.param_dtype == "kept" else self.param_dtype


def export(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    """Write a part of a run's checkpoint to `out`. Raise ConfigError if that is impossible."""
    write = {"policy": _export_policy, "draft": _export_draft, "adapters": _export_adapters}[args.part]
    try:
        write(out, experiment, args)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def made_for(directory: Path, which: Which, decoder: DecoderConfig | None) -> MadeFor | None:
    """Return the record of a draft in a run's checkpoint: its policy, the policy's shape, and the predicted acceptance.

    None if the run's metrics are missing, or if the policy is of a custom family. The acceptance is that of the saved
    step; a checkpoint from before the first step has none.
    """
    if decoder is None or not (directory / METRICS_FILE).is_file():
        return None
    run = read_run(directory)
    steps, values = run.measured("draft/predicted_acceptance")
    predicted = values[steps == saved_step(directory, which)].tolist()
    temperature = flat(run.config).get("rollout.law.temperature")
    if not isinstance(temperature, int | float) or not matches_schema(temperature, int | float):
        raise ConfigError(f"{directory / CONFIG_FILE}: rollout.law.temperature = {temperature}: must be a number")
    return MadeFor(str(directory), decoder.hidden_size, decoder.num_layers, temperature, next(iter(predicted), None))


def _export_draft(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    draft, run = experiment.networks.draft, Path(args.checkpoint)
    dialect = None if args.dialect == "ours" else args.dialect
    draft.check_writable(dialect)
    params = restore_params(run, experiment, args.checkpoint_step)
    write_draft(out, experiment, draft, params, dialect, args.verifier or args.checkpoint, args.dtype)
    state_made_for(out, made_for(run, args.checkpoint_step, experiment.networks.decoder))


def _export_adapters(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    config, decoder, path = experiment.config, experiment.networks.decoder, experiment.config.model.path
    if not config.lora.enabled or decoder is None:
        raise ConfigError("part = adapters: must be policy or draft, because the run trains all weights, no adapters")
    adapters = cast(restore_policy(Path(args.checkpoint), experiment, args.checkpoint_step), args.dtype)
    name = None if path is None else hub_name(path, "model")
    base, revision = (path, None) if name is None else (name.repo, name.revision)
    save_adapters(out, adapters, layers_of(config.lora, decoder), decoder, base, revision)
    made_for_base = base_of(config, decoder, experiment.networks.base_hash)
    state_made_for(out, made_for_base)
    if (line := _rounded_base(config.lora, made_for_base)) is not None:
        console.print(line)


def _rounded_base(lora: LoraConfig, base: MadeFor) -> str | None:
    """Return a line if the base of adapters is not what its name stands for; None if it is."""
    if base.policy is None:
        return "the base of these adapters has random weights, which no file holds: --part policy writes both in one"
    stored = read_hf_config(checkpoint_directory("model.path", base.policy), ()).param_dtype
    if base.dtype in (stored, "float32"):
        return None
    option = f"--model.dtype {base.dtype}" if lora.base_dtype is None else f"--lora.base-dtype {lora.base_dtype}"
    return (
        f"adapters of a base in {base.dtype}: the weights that adapter_config.json names are in {stored}, with which "
        f"log-probs differ. made_for.json says so to our programs, which read the same base with {option}; "
        "--part policy writes base and adapters in one"
    )


def _export_policy(out: Path, experiment: Experiment, args: ExportArgs) -> None:
    run, networks, path, mtp = Path(args.checkpoint), experiment.networks, experiment.config.model.path, None
    if (run / CONFIG_FILE).is_file():
        recorded = read_recorded(run / CONFIG_FILE, "checkpoint")
        check_same(experiment.config, recorded, ("rollout.stop_tokens", "rollout.stop_strings"))
    if networks.draft.in_policy:
        params = restore_params(run, experiment, args.checkpoint_step)
        mtp = networks.draft.policy_head(cast(params.draft, args.dtype))
    else:
        policy = restore_policy(run, experiment, args.checkpoint_step)
        params = replace(networks.params, policy=policy)
        if path is not None and networks.decoder is not None:  # keep a head that the run did not draft with
            source = checkpoint_directory("model.path", path)
            mtp = load_mtp(source, networks.decoder, experiment.mesh, args.dtype)
    write_policy(out, experiment, params, mtp, args.dtype)
    if networks.draft.in_policy:
        state_made_for(out, made_for(run, args.checkpoint_step, networks.decoder))
