"""launch.plan before it compiles: which meshes it tries first, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import jax
import pytest

import launch.plan.plan
from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.errors import ConfigError, RunStopped
from launch.plan import devices
from launch.plan.__main__ import main
from launch.plan.alternatives import smaller_rollouts
from launch.plan.bound import check_bound
from launch.plan.estimate import MeshEstimate, estimate
from launch.plan.flops import Flops
from launch.plan.meshes import by_seconds, sensible_meshes, with_mesh
from launch.plan.options import PlanConfig
from launch.plan.programs import Planned
from launch.plan.traffic import Collectives, Traffic
from launch.predict.clock import ACCEPTANCE, deployment_on, round_times
from launch.predict.memory import USABLE, ProgramName
from launch.setup.experiment import Experiment, abstract_experiment
from models.files import read_json
from specjax.cost import HARDWARE
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.documents import ROOT
from tests.launch.programs import argv, changes
from tests.launch.test_plan import CONFIG, SMALL, planned_memory
from tests.refusals import assert_refused


def test_sensible_meshes_use_all_gpus_and_keep_tensor_within_links():
    def shapes(count: int, joined: int, mixture: bool = False) -> set[tuple[int, ...]]:
        return {mesh.shape for mesh in sensible_meshes(count, joined, mixture)}

    assert shapes(8, 8) == {(1, 8, 1, 1), (1, 4, 1, 2), (1, 2, 1, 4), (1, 1, 1, 8)}
    assert shapes(16, 8) >= {(1, 16, 1, 1), (2, 8, 1, 1), (1, 2, 1, 8), (2, 1, 1, 8)}
    assert shapes(6, 3) == {(1, 6, 1, 1), (2, 3, 1, 1)}
    assert shapes(16, 8, mixture=True) >= {(1, 16, 1, 1), (1, 2, 8, 1), (1, 2, 2, 4), (1, 1, 4, 4)}
    assert {math.prod(shape) for shape in shapes(64, 8, mixture=True)} == {64}
    config = override(CONFIG, {"microbatches": 6})
    assert [with_mesh(config, MeshConfig(fsdp=size)).microbatches for size in (1, 2, 4)] == [8, 4, 2]


def test_the_first_ranked_mesh_that_fits_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Four meshes: 8 data shards do not divide the prompts, XLA refuses one, and one is too large."""
    monkeypatch.setattr(devices, "absent_gpus", lambda name, count, per_host: jax.devices()[:count])
    compiled = []

    def compile_one(config: RunConfig, plan: PlanConfig, name: ProgramName) -> Planned:
        if config.mesh not in compiled:
            compiled.append(config.mesh)
        if len(compiled) == 1:
            raise RunStopped("refused by XLA")
        nothing = Collectives(Traffic(), Traffic(), Traffic())
        return Planned({"caches": 2**40 if len(compiled) == 2 else 2**30}, nothing, Flops(1.0, 1.0), 1.0, {})

    monkeypatch.setattr(launch.plan.plan, "plan_program", compile_one)
    heads = changes("--model.architecture.num-heads 8 --draft.num-heads 8 --rollout.group-size 4")
    words = [*argv("tiny", SMALL | heads), "--plan.mesh", "auto", "--json", str(tmp_path / "plan.json")]
    assert main(words) == 0
    out, found = capsys.readouterr().out, read_json(tmp_path / "plan.json")
    ranked = [each["mesh"] for each in found["meshes"]]
    assert ranked[:3] == [vars(mesh) for mesh in compiled] and found["mesh"] == ranked[2]
    steps = [each["weights_s"] + each["drafted_rounds_s"] + each["update_s"] for each in found["meshes"]]
    assert steps == sorted(steps) and all(steps)
    assert "fsdp 8                            refused: data.prompts = 4" in out
    for part in ("refused by XLA", "does not fit: 1,024.0 GiB", "mesh: --mesh.data 1 --mesh.fsdp 1 --mesh"):
        assert part in out
    # A GPU of 500 kB: a mesh of one device is too small, one of two is not.
    monkeypatch.setattr(launch.plan.plan, "USABLE", 500_000 / HARDWARE["h100"].memory)
    with pytest.raises(
        ConfigError, match=r"^plan.gpus = 1: too few for every mesh; one device needs .* nearest: --plan.gpus 2$"
    ):
        main([*words, "--plan.gpus", "1"])


def test_meshes_rank_by_steps_with_drafts_and_near_equals_by_their_rounds():
    def rank(**drafted: float) -> list[str]:
        rows = [
            MeshEstimate(override(CONFIG, {"mesh": MeshConfig(tensor=size)}), {}, 0.0, 9.0 - size, drafted[name], 50.0)
            for size, name in ((1, "tensor1"), (2, "tensor2"), (4, "tensor4"))
        ]
        return [f"tensor{row.config.mesh.tensor}" for row in by_seconds(rows)]

    assert rank(tensor4=51.0, tensor1=50.0, tensor2=50.5) == ["tensor1", "tensor2", "tensor4"]
    assert rank(tensor4=50.0, tensor1=52.0, tensor2=51.0) == ["tensor1", "tensor4", "tensor2"]
    assert rank(tensor4=50.0, tensor1=55.0, tensor2=51.0) == ["tensor4", "tensor2", "tensor1"]


def test_estimates_follow_remat_slots_and_the_bytes_of_the_base():
    one = override(CONFIG, {"mesh": MeshConfig(), "lora.rank": 2})

    def experiment_of(**changed: Any) -> Experiment:
        config = override(one, {name.replace("__", "."): value for name, value in changed.items()})
        return abstract_experiment(config, make_mesh(config.mesh))

    # Forward and backward are two passes beside frozen weights; with full rematerialization the forward runs again.
    kept, again = (estimate(experiment_of(model__remat=remat), HARDWARE["h100"]) for remat in ("none", "full"))
    assert again.update == pytest.approx(3 / 2 * kept.update)
    # A wave that is not full takes as long as a full one.
    experiment = experiment_of(rollout__phases=((3, 64),))
    waves = math.ceil(experiment.sequences / 3)
    rounds = waves * one.rollout.max_new_tokens * round_times(experiment, HARDWARE["h100"])[0].seconds[0]
    assert experiment.sequences % 3 and estimate(experiment, HARDWARE["h100"]).plain == pytest.approx(rounds)
    for dtype, size in ((None, 4), ("int8", 1)):
        experiment = experiment_of(lora__base_dtype=dtype)
        assert deployment_on(experiment.mesh, experiment).weight_bytes == size


def test_rounds_are_drafted_at_the_fastest_of_the_lengths_that_a_run_has():
    for lengths, fixed in (((), 3), ((0, 3), 3), ((), 0)):
        config = override(CONFIG, {"rollout.draft_lengths": lengths, "rollout.draft_length": fixed})
        experiment = abstract_experiment(config, make_mesh(config.mesh))
        step, seconds = estimate(experiment, HARDWARE["h100"]), round_times(experiment, HARDWARE["h100"])[0].seconds
        gains = {k: sum(ACCEPTANCE**i for i in range(k + 1)) for k in lengths or (fixed,)}
        fastest = min(seconds[k] / gain for k, gain in gains.items())
        assert step.drafted / step.plain == pytest.approx(fastest / seconds[0])
    assert sum(ACCEPTANCE**i for i in range(4)) == pytest.approx(2.77, abs=0.01)


def test_row_95_the_first_command_of_the_lora_page_fits_the_gpu_that_the_page_promises():
    """Compute what follows from shapes; take the totals from the recorded plan."""
    page = (ROOT / "docs" / "lora.md").read_text()
    words = next(line.split()[3:] for line in page.splitlines() if "-m launch.train own_data" in line)
    recorded = read_json(ROOT / "benchmarks" / "results" / "plans" / "own_data_lora_1xh100.json")
    words[words.index("Qwen/Qwen3-8B")] = str(ROOT / "benchmarks" / "plans" / "qwen3_8b")
    for name, known in planned_memory(parse_run(words, "", "")).items():
        found = recorded["programs"][name]["memory"]
        for part in known.keys() - {"second copy of the gradients"}:
            assert found[part] == known[part], (name, part)
        assert sum(found.values()) < USABLE * 80e9


def test_row_95_what_cannot_fit_is_refused_before_it_is_compiled_with_the_smallest_changes_that_would():
    config = override(CONFIG, {"mesh": MeshConfig(), "data.prompts": 64})
    experiment = abstract_experiment(config, make_mesh(config.mesh))
    known = planned_memory(config)["generate"]
    check_bound(experiment, sum(known.values()))
    usable = sum(known.values()) - 0.6 * known["caches"]
    with pytest.raises(ConfigError) as caught:
        check_bound(experiment, usable)
    assert_refused(
        str(caught.value),
        "mesh = one device: generate ...--rollout.phases 32 ...--data.prompts 16 ...more GPUs (--plan.gpus)",
    )
    slots = dict(smaller_rollouts(config, phases=True))
    assert [words.split()[0] for words in slots] == ["--rollout.phases", "--data.prompts", "--data.max-prompt-tokens"]
