"""A run with adapters: what it saves, how it goes on, and what other programs make of it."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import launch.setup.networks
from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.run.networks import restore_params
from launch.run.pin_references import with_commits
from launch.run.summary import summarize
from launch.setup.experiment import Experiment, build_experiment
from launch.trainer import TrainedRun
from specjax.checkpoint_integrity import fingerprint
from specjax.types import TrainState
from tests.launch.programs import ONE_LAYER, SMALLEST, assert_same_run, metrics, run_to_the_end, saved_state
from tests.launch.test_resume import odd
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("steps_once")
CONFIG = override(
    SMALLEST,
    {
        **{"name": "lora", "steps": 50, "probe_every": 0, "lora.rank": 2, "lora.alpha": 6.0, "print_every": 50},
        **{"draft.kind": "model", "draft.architecture": ONE_LAYER, "rollout.draft_length": 1},
        **{"rollout.group_size": 2, "rollout.max_new_tokens": 8, "data.prompts": 2, "loss.kl_coefficient": 0.1},
        **{"reward.scorer": "exact_traced", "policy_optimizer.learning_rate": 0.1, "checkpoint.every": 25},
    },
)


Trained = tuple[Path, TrainState, Experiment]


run = partial(run_to_the_end, reward_fn=odd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("lora") / "run"
    return directory, *run(replace(CONFIG, out=str(directory)))


def test_the_base_stays_and_is_not_saved(trained: Trained):
    directory, state, experiment = trained
    assert fingerprint(state.params.base) == experiment.networks.base_hash
    assert all(np.asarray(x).any() for x in jax.tree.leaves(state.params.policy))
    networks, rest = saved_state(directory, 50)
    assert {path[-1].key for path, _ in jax.tree.leaves_with_path(networks["params"]["policy"])} == {"lora_a", "lora_b"}
    kernel = state.params.base["layer_0"]["mlp"]["gate"]["kernel"].shape
    assert kernel not in [x.shape for x in jax.tree.leaves((networks["params"]["policy"], rest["optimizer"]["policy"]))]
    extra = json.loads((directory / "checkpoints/50/extra/metadata").read_text())
    assert extra["base"] == experiment.networks.base_hash


def assert_goes_on_to_the_bit(config: RunConfig, copied: Path) -> None:
    """Take the last step of a finished run again, in a copy that lacks its last checkpoint."""
    directory = Path(config.out)
    shutil.copytree(directory, copied)
    shutil.rmtree(copied / "checkpoints" / str(config.steps))
    stored = copied / "config.json"
    stored.write_text(stored.read_text().replace(str(directory), str(copied)))
    # The directory has all options.
    run(parse_run([str(copied), "--resume"], "", ""))
    assert_same_run(copied, directory, config.steps)


def test_a_killed_run_goes_on_to_the_bit(trained: Trained, tmp_path: Path):
    directory, *_ = trained
    assert_goes_on_to_the_bit(replace(CONFIG, out=str(directory)), tmp_path / "copy")


def test_adapters_refuse_another_base(trained: Trained):
    directory, _, experiment = trained
    other = build_experiment(replace(CONFIG, seed=CONFIG.seed + 1), training=False)
    with refuses(f"checkpoint = {directory}...trained beside weights with the hash {experiment.networks.base_hash}"):
        restore_params(directory, other)


def test_programs_take_adapters_from_the_run(trained: Trained):
    directory, state, _ = trained
    config = with_commits(override(CONFIG, {"lora.rank": 0, "lora.alpha": None}), directory)
    assert config.lora == CONFIG.lora
    params = restore_params(directory, build_experiment(config, training=False))
    jax.tree.map(np.testing.assert_array_equal, params.policy, state.params.policy)


def test_the_start_states_the_adapters_and_their_rate():
    config = parse_run(["tiny", "--lora.rank", "4"], "launch.train", "")
    assert config.policy_optimizer.learning_rate == 4e-4
    model, *_, step, _ = summarize(build_experiment(CONFIG), continuing=False)
    assert "frozen in float32; trains LoRA of rank 2" in model
    assert "learning rate 0.1 of the adapters" in step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.rank": 0}, "lora.alpha = 6.0: must be None without lora.rank or lora.path"),
        ({"lora.path": "adapter"}, "lora.rank = 2: must be 0 with lora.path"),
        ({"lora.targets": ()}, "lora.targets = ()"),
        ({"reference_every": 2}, "reference_every = 2: must be 0 with lora.rank = 2"),
        ({"warmup.steps": 2}, "warmup.steps = 2: must be 0 with lora.rank = 2 and loss.kl_coefficient"),
        ({"policy_optimizer.kind": "muon"}, "policy_optimizer.kind = muon: must be adamw with lora.rank = 2"),
        (
            {"lora.merged": True, "loss.importance_cap": None},
            "lora.merged = True: must be False, or loss.importance_cap",
        ),
        ({"lora.rank_pattern": ((3, "layer_9.q"),)}, "lora.rank_pattern = 3 layer_9.q: no layer"),
        ({"lora.rank": 9}, "lora.rank = 9: must be at most 8, the highest rank of its layers"),
        ({"lora.rank": 2**31 - 1}, "lora.rank = 2147483647: must be at most 8"),
        (
            {"lora.rank_pattern": ((99, "layer_0.attention.q"),)},
            "lora.rank_pattern = 99 layer_0.attention.q: ...most 8",
        ),
    ],
)
def test_adapters_are_refused(changes: dict, message: str):
    with refuses(message):
        build_experiment(override(CONFIG, changes))


def test_only_the_base_is_in_the_compute_dtype():
    config = override(CONFIG, {"model.dtype": "bfloat16", "draft.kind": "eagle3", "draft.architecture": None})
    architecture = replace(ONE_LAYER, feature_layers=(0,))
    params = build_experiment(override(config, {"model.architecture": architecture}), training=False).networks.params
    dtypes = [{str(x.dtype) for x in jax.tree.leaves(tree)} for tree in (params.policy, params.draft)]
    assert dtypes == [{"float32"}, {"float32"}]
    assert params.base["embed"]["embedding"].dtype == "bfloat16"


@pytest.mark.slow
def test_a_base_in_8_bits_is_one_policy_in_rollout_and_training(tmp_path: Path):
    options = {"lora.base_dtype": "int8", "rollout.draft_length": 0, "rollout.draft_lengths": (0, 1)}
    config = override(CONFIG, {**options, "steps": 2, "checkpoint.every": 1, "out": str(tmp_path / "run")})
    state, experiment = run(config)
    assert state.params.base["layer_0"]["mlp"]["gate"]["kernel"].values.dtype == "int8"
    assert fingerprint(state.params.base) == experiment.networks.base_hash
    assert all(line["rollout/logprob_gap_mean"] < 1e-5 for line in metrics(tmp_path / "run"))
    assert_goes_on_to_the_bit(config, tmp_path / "copy")


def test_a_run_in_python_saves_after_its_base_was_donated(trained: Trained, tmp_path: Path):
    directory, state, experiment = trained
    TrainedRun(directory, experiment.with_state(state), state, None).save(tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_resume_refuses_another_base_at_the_same_path(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    directory, *_ = trained
    monkeypatch.setattr(launch.setup.networks, "fingerprint", lambda base: "00000000")
    config = replace(CONFIG, out=str(directory), resume=True, steps=51)
    with refuses("resume: its adapters were trained beside...have 00000000"):
        run(config)
