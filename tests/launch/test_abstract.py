"""An experiment whose networks are shapes has the same state structure as the real one."""

from pathlib import Path
from typing import Any

import jax
import pytest

from configs.override import override
from launch.cli.options import parse_run
from launch.cli.recipes import load_recipe
from launch.setup.experiment import abstract_experiment, build_experiment
from launch.setup.state import abstract_state, fresh_state
from models.config import ExpertsConfig
from models.files import read_json, write_json
from specjax.parallel.mesh import make_mesh
from tests.launch.programs import FEW, Options, argv, changes

SMALL = FEW | changes(
    "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --microbatches 1 --rollout.group-size 2",
    "--model.architecture.num-kv-heads 2 --model.architecture.vocab-size 16",
)


def described(tree: Any) -> list[tuple[Any, ...]]:
    return [(path, x.shape, x.dtype, x.sharding) for path, x in jax.tree.leaves_with_path(tree)]


EXPERTS = {"model.architecture.experts": ExpertsConfig(num_experts=4, active=2, intermediate_size=8)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        changes("--draft.vocab-size 8 --loss.kl-coefficient 0.1 --policy-optimizer.kind muon"),
        changes("--draft.lookup.kind history --draft-training.replay 2"),
        changes("--draft.kind mtp --draft.mtp-convention mimo --model.feature-layers"),
        changes("--draft.kind none --rollout.draft-length 0 --model.param-dtype bfloat16"),
        changes("--loss.kl-coefficient 0.1 --warmup.steps 0 --lora.rank 3 --lora.base-dtype int8"),
        # Muon has a matrix of moments for each expert.
        changes("--policy-optimizer.kind muon --mesh.data 1 --mesh.expert 2") | EXPERTS,
    ],
    ids=["eagle3", "reduced vocabulary", "history", "mtp", "none", "adapters", "experts"],
)
def test_the_abstract_state_has_the_structure_of_the_runs(options: Options):
    config = override(load_recipe("tiny"), SMALL | options)
    real, abstract = build_experiment(config), abstract_experiment(config, make_mesh(config.mesh))
    assert abstract.config == real.config
    assert described(abstract_state(abstract)) == described(fresh_state(real, real.networks.params, None))


def test_config_json_of_a_checkpoint_is_enough(shrunk: Options, files: Path, tmp_path: Path):
    real = build_experiment(parse_run(argv("gsm8k", shrunk), "", ""))
    write_json(tmp_path / "config.json", read_json(files / "policy" / "config.json"))
    config = parse_run(argv("gsm8k", shrunk | {"--model.path": str(tmp_path), "--data.train": "absent"}), "", "")
    abstract = abstract_experiment(config, make_mesh(config.mesh))
    assert described(abstract.networks.params) == described(real.networks.params)
