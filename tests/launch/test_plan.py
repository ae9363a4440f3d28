"""launch.plan: the step of a run, compiled for devices that may be absent."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import pytest

import launch.plan.plan
import launch.train
from configs.override import override
from configs.schema import RunConfig
from launch.cli.recipes import load_recipe
from launch.costs.round_timer import first_rows
from launch.errors import RunStopped
from launch.plan import devices
from launch.plan.__main__ import main
from launch.plan.alternatives import alternatives
from launch.plan.estimate import MeshEstimate, estimate
from launch.plan.flops import Flops, flops
from launch.plan.memory import TEMPORARIES, known_components
from launch.plan.options import PlanArgs, PlanConfig
from launch.plan.programs import Plan, Planned, compile_by_any
from launch.plan.report import as_json, memory_table, round_table
from launch.plan.traffic import Collectives, Traffic
from launch.predict.clock import round_times
from launch.predict.memory import PROGRAMS, Parts, ProgramName, checkpoint_copy, of_step_rollout
from launch.setup.experiment import Experiment, abstract_experiment
from launch.setup.state import abstract_state
from models.config import ExpertsConfig
from models.files import read_json
from specjax.cost import HARDWARE
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import MeshConfig, batch_shards, disjoint_mesh, make_mesh
from specjax.rollout.rounds import Decoding
from specjax.testing.hlo import Program, collectives
from specjax.types import LayerCache, Params, Prompts, PyTree
from tests.documents import ROOT, blocks
from tests.launch.programs import FEW, SMALLEST, Refusal, argv, changes, finish, start
from tests.refusals import assert_refused

# Every axis of the mesh divides the dimensions that it shards.
SMALL = FEW | changes(
    "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --microbatches 2 --rollout.group-size 2",
    "--model.architecture.num-kv-heads 2 --model.architecture.vocab-size 16",
)


CONFIG = override(load_recipe("tiny"), SMALL)
AHEAD = "--asynchronous.lag 1 --loss.importance-cap 2"
# A policy of 688 weights and 24 scales of norms, and a draft of 824 and 32. `fsdp` divides the weights.
TWO_NETWORKS = override(SMALLEST, {"steps": 4, "model.feature_layers": (0,), "model.dtype": "bfloat16", "mesh.fsdp": 2})
TWO_MESHES = override(TWO_NETWORKS, changes(f"{AHEAD} --asynchronous.rollout-mesh.data 2"))


@pytest.mark.slow
def test_a_plan():
    config, experiment = CONFIG, abstract_experiment(CONFIG, make_mesh(CONFIG.mesh))
    plan = Plan(experiment)
    found = {name: plan.program(name) for name in PROGRAMS}
    lines = [*memory_table(found, capacity=max(each.total for each in found.values()) + 1)]
    assert lines[-1].startswith("does not fit")
    assert [*memory_table(found, 2**40)][-1] == "fits"
    assert found["generate"].memory["caches"] and found["update"].memory["gradients"]
    turn, update = found["generate"].collectives.turn, found["update"].collectives.fixed
    assert turn.count and {kind.axes for kind in turn.count} == {("tensor",)}
    (phase,), networks, heads = experiment.phases, experiment.networks, config.model.architecture.num_kv_heads
    keys = phase.slots, heads // config.mesh.tensor, phase.window + config.rollout.slack, 8
    text = plan.compile("generate", plan.trace("generate"))[0].as_text()
    assert text
    loop = Program(text).loop(keys, times=2 * config.model.architecture.num_layers)
    gathered = {dims for line in collectives(loop) if "all-gather" in line.opcode for dims in line.arrays}
    assert gathered and not gathered & {x.shape for x in jax.tree.leaves(networks.params)}
    assert any("fsdp" in kind.axes for kind in update.count)
    # A round verifies 5 tokens in each of 8 rows, with a policy of over 4,000 parameters.
    assert found["generate"].flops.turn > 2 * 4_000 * 5 * 8
    written = json.loads(json.dumps(as_json(config, PlanConfig(gpu="cpu"), found, [], [], [], 1)))
    assert written["programs"].keys() == found.keys()


def test_of_a_ladder_only_the_longest_window_is_compiled():
    plain, bucketed = (plan_of(ladder=ladder).trace("update") for ladder in ((), (8, 12)))
    assert flops(bucketed.jaxpr.jaxpr) == flops(plain.jaxpr.jaxpr)
    assert len(str(bucketed.jaxpr)) < 1.2 * len(str(plain.jaxpr))


def plan_of(**values: Any) -> Plan:
    """Return the plan of the small run with other values (`__` stands for a dot)."""
    config = override(CONFIG, {name.replace("__", "."): value for name, value in values.items()})
    return Plan(abstract_experiment(config, make_mesh(config.mesh)))


def plan_of_a_mixture() -> Plan:
    experts, mesh = ExpertsConfig(num_experts=4, active=2, intermediate_size=8), MeshConfig(fsdp=2, expert=2, tensor=2)
    return plan_of(logit_chunk=8, model__remat="full", model__architecture__experts=experts, mesh=mesh)


def test_an_update_gathers_weights_over_fsdp_and_neither_logits_nor_vocabulary_heads():
    kinds = plan_of_a_mixture().program("update").collectives.fixed.count
    assert {kind.axes for kind in kinds if kind.operation == "all-gather"} == {("fsdp",)}


def test_row_64_the_rollout_mesh_holds_copies_and_the_training_mesh_moments():
    """Parameters and moments are float32, copies bfloat16; lag 1 has two copies, and parts of one under way."""
    policy, draft, copy = 4 * (688 // 2 + 24), 4 * (824 // 2 + 32), 2 * (688 + 24 + 824 + 32)
    moments, counts, part = 2 * (policy + draft), 4 * 4, copy // 2
    trained = {"policy": policy, "draft": draft, "moments of the optimisers": moments + counts, "reference policy": 0}
    ahead, plain = planned_memory(TWO_MESHES), planned_memory(TWO_NETWORKS)
    assert {"copies of the networks": 2 * copy, "parts of the next copy": part}.items() < ahead["generate"].items()
    # Both rollout shards, and both of a synchronous run, have half of the rows.
    assert ahead["generate"]["caches"] == plain["generate"]["caches"] and ahead["generate"]["rollouts that wait"]
    assert not (trained.keys() | {"gradients", "parts of a copy to send"}) & ahead["generate"].keys()
    assert trained.items() < ahead["update"].items()
    assert ahead["update"].pop("parts of a copy to send") == part and ahead["update"] == plain["update"]
    assert plain["generate"]["copy for the rollout"] == copy and trained.items() < plain["generate"].items()


@pytest.mark.parametrize("config", [TWO_MESHES, override(TWO_NETWORKS, {"mesh.fsdp": 1})])
def test_the_base_of_adapters_is_held_once_and_sent_before_the_first_step(config: RunConfig):
    """Its dtype is that of the rollout, so that without fsdp a synchronous rollout copies nothing of it."""
    adapted, scales = experiment_of(override(config, {"lora.rank": 2})), 7
    params, state = adapted.networks.params, abstract_state(adapted)
    base, adapters, draft = (
        sum(x.size for x in jax.tree.leaves(tree)) for tree in (params.base, params.policy, params.draft)
    )
    sent, held = 2 * (adapters + draft), known_components("generate", adapted, state)
    if config.asynchronous.lag:
        assert (
            held["copies of the networks"] == 2 * (base + scales) + 2 * sent
            and held["parts of the next copy"] == sent // 2
        )
        seconds, of_all = (estimate(x, HARDWARE["h100"]).weights for x in (adapted, experiment_of(config)))
        assert seconds / of_all == pytest.approx(sent / (2 * (base - scales + draft)), rel=0.01)
    else:
        assert held["copy for the rollout"] == sent
        assert (held["frozen weights"], held["adapters"]) == (2 * (base + scales), 4 * adapters)
    update, size = known_components("update", adapted, state), bytes_per_device((params.policy, params.draft))
    assert update["gradients"] == update["second copy of the gradients"] == size
    # A checkpoint has no base. A host of two devices has both parts of what `fsdp` divides, and the rest once.
    assert sum(x.size for x in jax.tree.leaves(state.params.base)) == base
    trained = replace(state, params=replace(params, base=()))
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trained))
    assert checkpoint_copy(state, 2) == whole and checkpoint_copy(state, 1) == bytes_per_device(trained)


def test_the_example_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Compute what follows from the update's shapes; totals of both programs are those that were recorded."""
    text = (ROOT / "docs" / "plan.md").read_text()
    words, shown = blocks(text, "bash")[0].split()[3:], blocks(text)[0].splitlines()
    recorded = read_json(ROOT / "benchmarks" / "results" / "plans" / "qwen3_8b_rl_zero_8xh100.json")["programs"]

    def compile_one(config: RunConfig, plan: PlanConfig, name: ProgramName) -> Planned:
        before = recorded[name]["memory"]
        known = {part: size for part, size in before.items() if part != TEMPORARIES}
        if name == "update":
            assert known.items() < (known := known_components(name, built[0], abstract_state(built[0]))).items()
        temporaries = sum(before.values()) - sum(known.values())
        nothing = Collectives(Traffic(), Traffic(), Traffic())
        return Planned(known | {TEMPORARIES: temporaries}, nothing, Flops(1.0, 1.0), 1.0, {})

    built = list[Experiment]()
    monkeypatch.chdir(ROOT)
    module = launch.plan.plan
    monkeypatch.setattr(
        module, "abstract_experiment", lambda *args: built.append(abstract_experiment(*args)) or built[-1]
    )
    monkeypatch.setattr(devices, "absent_gpus", lambda name, count, per_host: jax.devices()[:count])
    monkeypatch.setattr(launch.plan.plan, "plan_program", compile_one)
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert set(shown) <= set(said)
    table = {line[2:36].strip(): line[36:] for line in shown if line.startswith("  ")}
    parts = [name for name in table if name not in ("total", "of the device")]
    for column in (slice(0, 10), slice(10, 20)):
        sizes = [float(table[name][column]) for name in parts if table[name][column].strip()]
        assert sum(sizes) == pytest.approx(float(table["total"][column]), abs=0.05 * len(sizes))


def experiment_of(config: RunConfig) -> Experiment:
    mesh, ahead = make_mesh(config.mesh), config.asynchronous
    return abstract_experiment(config, mesh, None if ahead.lag is None else disjoint_mesh(ahead.rollout_mesh, mesh))


def planned_memory(config: RunConfig) -> dict[ProgramName, Parts]:
    experiment = experiment_of(config)
    state = abstract_state(experiment)
    return {name: known_components(name, experiment, state) for name in PROGRAMS}


def test_each_program_of_an_asynchronous_step_is_compiled_for_its_own_mesh():
    config = override(TWO_MESHES, {"draft.kind": "none", "rollout.draft_length": 0, "mesh.fsdp": 4, "data.prompts": 4})
    plan = Plan(experiment_of(config))
    found = plan.program("generate")
    assert found.memory[TEMPORARIES] and not found.collectives.total
    assert "num_partitions = 4 " in plan.trace("update").lower().as_text()


def test_an_asynchronous_step_takes_the_longer_phase_and_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    nothing = Collectives(Traffic(), Traffic(), Traffic())
    monkeypatch.setattr(devices, "absent_gpus", lambda name, count, per_host: jax.devices()[:count])

    def compile_one(config: RunConfig, plan: PlanConfig, name: ProgramName) -> Planned:
        return Planned({"caches": 2**40 if name == "generate" else 2**30}, nothing, Flops(1.0, 1.0), 1.0, {})

    monkeypatch.setattr(launch.plan.plan, "plan_program", compile_one)
    options = PlanArgs(str(tmp_path / "plan.json"), PlanConfig(gpus=8, alternatives=False))
    launch.plan.plan.plan(override(TWO_MESHES, {"data.prompts": 4}), options)
    out, found = capsys.readouterr().out, read_json(tmp_path / "plan.json")["asynchronous"]
    for line in (
        "4 NVIDIA H100 80GB HBM3 (data 4, fsdp 1, expert 1, tensor 1) that generate",
        "mesh: fits",
        "asynchronous.rollout_mesh: does not fit: 1,024.0 GiB",
        "  lag 1                         8 ",
        "  synchronous                   4 ",
    ):
        assert line in out
    ahead, synchronous = found["steps"]["lag"], found["steps"]["synchronous"]
    assert found["rollout_mesh"]["data"] == 4 and ahead["update_s"] == synchronous["update_s"]
    # One round per token. 3,136 bytes of weights: a quarter arrives over the links, and the others are gathered.
    assert ahead["weights_s"] == pytest.approx(3136 / HARDWARE["h100"].link)
    for lag, seconds in ((None, 6.0), (0, 6.0), (1, 4.0)):
        config = override(TWO_NETWORKS, {"asynchronous.lag": lag, "loss.importance_cap": 2.0})
        step = MeshEstimate(config, {}, weights=1.0, plain=9.0, drafted=2.0, update=3.0)
        assert (step.seconds, step.plain_seconds) == (seconds, seconds + (6.0 if lag else 7.0))


@pytest.mark.slow
def test_the_outputs_of_experts_are_summed_over_their_axis():
    found = plan_of_a_mixture().program("generate")
    assert {kind.axes for kind in found.collectives.turn.count} == {("tensor",), ("expert", "tensor")}


@pytest.mark.slow
def test_a_plan_for_512_devices(tmp_path: Path):
    options = SMALL | changes("--mesh.data 4 --mesh.fsdp 8 --mesh.tensor 2 --microbatches 1 --data.prompts 256")
    words = ["--plan.gpu", "cpu", "--plan.gpus", "512", "--json", str(tmp_path / "plan.json")]
    out = finish(start("tiny", options, *words, program="launch.plan"))
    assert "512 CPU devices" in out and "NOT A GPU'S FIGURES" in out
    plan = read_json(tmp_path / "plan.json")
    assert plan["mesh"]["data"] == 32
    assert {tuple(each["axes"]) for each in plan["collectives"]["one round"]} == {("tensor",)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "...--plan.gpu cpu"),  # without the plugin
        ("--plan.gpu a100", "plan.gpu = a100: must be h100|h200|b200|gb200|cpu"),
        ("--plan.gpus 12", "plan.gpus = 12:...8 devices of mesh = (2, 2, 1, 2); nearest: 8 or 16, or --plan.mesh auto"),
        ("--plan.gpus 16 --plan.per-host 3", "plan.per_host = 3:...plan.gpus = 16; nearest: 2 or 4"),
        ("--plan.mesh best", "plan.mesh = best: must be recipe|auto"),
        ("--plan.gpu cpu --json no/where", "json = no/where: its directory does not exist"),
        ("--plan.gpu cpu --model.family a:b", "model.family = a:b: must be None for a plan"),
        ("--plan.gpu cpu --model.dtype float16", "model.dtype = float16: must be float32|bfloat16"),
        ("--plan.gpu cpu --data.prompts 6", "data.prompts = 6:...mesh.data x mesh.fsdp = 4; nearest: 4 or 8"),
        ("--plan.gpu cpu --data.prompts 6 --plan.mesh auto", "plan.gpus = 8: ...data.prompts = 6:...nearest: 8"),
        (f"{AHEAD} --plan.mesh auto", "plan.mesh = auto: chooses one mesh; must be recipe with asynchronous.lag = 1"),
        (
            f"{AHEAD} --plan.gpus 12",
            "plan.gpus = 12:...9 devices of mesh = (2, 2, 1, 2) and asynchronous.rollout_mesh...",
        ),
        (
            f"--plan.gpu cpu {AHEAD} --mesh.data 5 --mesh.fsdp 1 --mesh.tensor 1 --asynchronous.rollout-mesh.data 3",
            "asynchronous.rollout_mesh = (3, 1, 1, 1): has 3 devices; must be a multiple or a divisor of 5...",
        ),
        ("--plan.gpu cpu --microbatches 3", "microbatches = 3:...2...nearest microbatches: 2"),
        ("--plan.gpu cpu --mesh.data 1 --mesh.tensor 4", "num_heads = 2:...4; nearest mesh.tensor: 2"),
        ("--plan.gpu cpu --rollout.max-new-tokens 99999", "...rollout.max_new_tokens = 100005:...32768"),
    ],
)
def test_refusals(words: str, message: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name if words else None)
    assert_refused(refusal(main, [*argv("tiny", SMALL), *words.split()]), message)


class Lowered:
    """Stands for a lowered program whose first compilations XLA refuses."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def compile(self, options: dict[str, Any]) -> dict[str, Any]:
        self.refusals -= 1
        if self.refusals >= 0:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes\nthat satisfy hlo")
        return options


def test_a_program_that_xla_refuses_is_compiled_with_other_options():
    for refusals, options in enumerate(devices.OPTION_SETS):
        lowered: Any = Lowered(refusals)
        assert compile_by_any("update", lowered, devices.OPTION_SETS) == (options, options)
    lowered = Lowered(refusals=2)
    with pytest.raises(RunStopped, match="^update: XLA .*: INTERNAL: Couldn't find output tile sizes; try another"):
        compile_by_any("update", lowered, devices.OPTION_SETS)


def test_gpus_are_described_to_xla_by_their_sheets():
    gpus = {name for name, sheet in HARDWARE.items() if sheet.chip is not None}
    assert {*get_args(get_type_hints(PlanConfig)["gpu"])} == gpus | {"cpu"}
    text = devices.target(HARDWARE["h100"])
    for line in ('"NVIDIA H100 80GB HBM3"', "memory_bandwidth: 3352320000000", "device_memory_size: 84942979072"):
        assert line in text


def traced_caches(experiment: Experiment) -> int:
    """Return the bytes per device of the caches with which a rollout starts, in the phase that needs most."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.rollout_mesh
    prompts = experiment.abstract_prompts(config.data.prompts // batch_shards(mesh))
    phase = max(experiment.phases, key=lambda phase: phase.slots * phase.window)

    def start(params: Params, prompts: Prompts) -> tuple[PyTree, PyTree]:
        decoding = Decoding(networks.policy, networks.drafter, params, config.rollout)
        state = first_rows(decoding, prompts, phase, blank=True)
        return state.cache, state.draft

    shapes = jax.eval_shape(start, replace(networks.params, memory=()), prompts)
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, LayerCache))
    return bytes_per_device([x for x in leaves if isinstance(x, LayerCache)]) // mesh.shape["tensor"]


def test_rounds_of_a_plan_take_what_the_sheet_says():
    """Each kind of draft has a sheet and a cache; devices of the tensor axis share a round's work."""
    shown = []
    kinds: list[dict[str, Any]] = [
        {"draft.kind": "none", "rollout.draft_length": 0},
        {},
        {"draft.kind": "mtp", "draft.mtp_convention": "mimo"},
        {"draft.kind": "dflash"},
        {"draft.kind": "model", "draft.unroll": 3, "draft.architecture": CONFIG.model.architecture},
    ]
    for kind in kinds:
        experiment = abstract_experiment(override(CONFIG, kind), make_mesh(CONFIG.mesh))
        times = round_times(experiment, HARDWARE["h100"])
        assert [each[:2] for each in times] == [*experiment.phases]
        phased = replace(experiment, config=override(experiment.config, {"rollout.phases": ((2, 8), (1, 64))}))
        assert of_step_rollout(phased)["caches"] == traced_caches(phased)
        assert [*times[0].seconds] == sorted({0, *experiment.config.rollout.lengths})
        assert [*round_table(times)][0].startswith("a round by the hardware sheet, ms")
        shown.append(times[0].seconds)
    none, *drafts = shown
    for draft in drafts:
        assert draft[0] == none[0] < draft[max(draft)]


def test_training_is_planned_with_an_option(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(launch.train, "plan", lambda words: seen.append(words) or 0)
    assert launch.train.main(["tiny", "--plan", "--plan.gpus", "8"]) == 0
    assert seen == [["tiny", "--plan.gpus", "8"]]


def test_alternatives_change_one_option_and_keep_the_devices_if_possible():
    config = override(CONFIG, {"mesh.data": 4, "data.prompts": 8, "logit_chunk": 8})
    for program, first in (("generate", "--rollout.phases 1 "), ("update", "--microbatches 4")):
        found = dict(alternatives(config, program, experts=False))
        more = alternatives(config, program, experts=True)
        assert {name for name, _ in more} - found.keys() == {"--mesh.expert 2 --mesh.data 2"}
        assert next(iter(found)).startswith(first)
        assert found["--mesh.tensor 4 --mesh.data 2"].mesh == MeshConfig(data=2, fsdp=2, tensor=4)
        assert found["--mesh.fsdp 4 --mesh.data 2"].mesh == MeshConfig(data=2, fsdp=4, tensor=2)
    assert {"--model.remat full", "--logit-chunk 4"} < found.keys()
    on_one_gpu = override(CONFIG, {"mesh": MeshConfig()})
    ahead = override(CONFIG, changes(f"{AHEAD} --asynchronous.rollout-mesh.data 2"))
    found = dict(alternatives(ahead, "generate", experts=False))
    name = "--asynchronous.rollout-mesh.tensor 2 --asynchronous.rollout-mesh.data 1"
    assert found[name].asynchronous.rollout_mesh == MeshConfig(tensor=2) and found[name].mesh == CONFIG.mesh
    assert "--mesh.tensor 2, so twice the GPUs" in dict(alternatives(on_one_gpu, "update", experts=False))
