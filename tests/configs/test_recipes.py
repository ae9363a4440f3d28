import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from configs.qwen3_math import base
from configs.schema import RolloutOptions, RunConfig
from launch.cli.recipes import load_recipe, recipes
from launch.errors import ConfigError
from launch.setup.problems import build_problems
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.hf.config import config_from_hf
from models.layers import init_cache
from models.lora import adapted_layers, init_adapters
from models.params import abstract_params
from specjax.cost import HARDWARE
from specjax.parallel.mesh import AXES, spec
from specjax.train.optimizer import make_optimizers
from specjax.types import PyTree
from specjax.verify import VERIFIERS, Verifier
from tests.refusals import refuses

GIB = 2**30
GPU_BYTES = 141e9

PUBLISHED = json.loads((Path(__file__).parents[1] / "models" / "published.json").read_text())
QWEN3_8B = config_from_hf(PUBLISHED["qwen3_8b"])
SHAPE = dict(hidden_size=4096, intermediate_size=12_288, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
HEAD = Eagle3Config(**SHAPE, feature_size=3 * 4096, vocab_size=151_936, draft_vocab_size=32_000)


@pytest.mark.parametrize("name", recipes())
def test_recipe(name: str):
    config = load_recipe(name)
    assert config.name == name
    assert json.loads(json.dumps(asdict(config)))["steps"] == config.steps
    rollout = config.rollout
    shards = config.mesh.data * config.mesh.fsdp
    assert config.data.prompts % shards == 0
    assert config.data.prompts // shards * rollout.group_size % config.microbatches == 0
    assert "17" in config.data.instruction.format(prompt="17")


def test_the_options_of_a_step_reach_it():
    config = RunConfig(name="own", steps=1, seed=5, microbatches=4, ladder=(16, 32), allow_truncated_law=True)
    step = config
    assert (step.seed, step.microbatches, step.ladder, step.allow_truncated_law) == (5, 4, (16, 32), True)


def test_gsm8k_finds_its_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SPECJAX_DATA", str(tmp_path))
    config = load_recipe("gsm8k")
    assert config.data.train == str(tmp_path / "gsm8k" / "train.jsonl")
    assert config.data.held_out == str(tmp_path / "gsm8k" / "test.jsonl")
    (tmp_path / "gsm8k").mkdir()
    for name in ("train", "test"):
        line = {"question": f"How many in {name}?", "answer": "Two and two.\n#### 4"}
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text(json.dumps(line))
    problems = build_problems(config)
    assert [(problem.prompt, problem.answer) for problem in problems.train] == [("How many in train?", "4")]
    assert problems.held_out[0].prompt == "How many in test?"


@pytest.mark.parametrize("name", ["qwen3_8b_rl_zero", "qwen3_8b_rl_think"])
def test_data_is_given_by_the_user(name: str):
    with refuses("data.train = None: ", ConfigError):
        build_problems(load_recipe(name))


@cache
def shapes_of(init: Callable[..., PyTree], config: object) -> PyTree:
    return jax.eval_shape(partial(init, config), jax.random.key(0))


def shares(boxed: PyTree, mesh: AbstractMesh, along: tuple[str, ...] = AXES) -> float:
    """Return the GiB per device of a network's float32 parameters, sharded only over the axes `along`."""

    def of(x: jax.ShapeDtypeStruct, logical: PartitionSpec) -> float:
        partition = spec(tuple(logical), x.shape, mesh)
        axes = [axis for entry in partition for axis in (entry if isinstance(entry, tuple) else (entry,))]
        return 4 * x.size / math.prod(mesh.shape[axis] for axis in axes if axis in along)

    return sum(jax.tree.leaves(jax.tree.map(of, nn.unbox(boxed), nn.get_partition_spec(boxed)))) / GIB


def cache_size(config: RunConfig, decoder: DecoderConfig, head: Eagle3Config) -> float:
    """Return the GiB per device of both networks' caches."""
    rollout, mesh = config.rollout, config.mesh
    rows = config.data.prompts * rollout.group_size // (mesh.data * mesh.fsdp)
    rows = min(rows, rollout.phases[0][0])
    length = config.data.max_prompt_tokens + rollout.max_new_tokens + rollout.draft_length + 1
    caches = jax.eval_shape(lambda: (make_policy(decoder).init_cache(rows, length), init_cache(head, rows, length)))
    assert head.num_kv_heads % mesh.tensor == 0
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) / mesh.tensor / GIB


def assert_fits(config: RunConfig, decoder: DecoderConfig, head: Eagle3Config, sizes: tuple[int, ...], memory: float):
    """Compare state, gradients, the copy for rollouts, and caches with `sizes`, in GiB per device."""
    mesh = AbstractMesh(config.mesh.shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    networks = shapes_of(init_decoder, decoder), shapes_of(init_eagle3, head)
    master = sum(shares(boxed, mesh) for boxed in networks)
    narrow = sum(shares(boxed, mesh, along=("expert", "tensor")) for boxed in networks) / 2
    caches = cache_size(config, decoder, head)
    assert tuple(map(round, (3 * master, master, narrow, caches))) == sizes
    assert max(3 * master + narrow + caches, 5 * master + narrow) * GIB < memory, "no room for activations"


@pytest.mark.parametrize(
    "name, expected, gpu",
    [("qwen3_8b_rl_zero", (12, 4, 16, 33), "h100"), ("qwen3_8b_rl_think", (12, 4, 16, 93), "h200")],
)
def test_the_named_mesh_is_large_enough(name: str, expected: tuple[int, ...], gpu: str):
    """Compare with the GiB per device in the recipe's docstring."""
    config = load_recipe(name)
    assert config.draft.vocab_size == HEAD.draft_vocab_size
    networks = [nn.unbox(shapes_of(init, shape)) for init, shape in ((init_decoder, QWEN3_8B), (init_eagle3, HEAD))]
    assert count(networks[0]) == 8_190_735_360
    optimizers = make_optimizers(config.policy_optimizer, config.draft_optimizer)
    for params, optimizer in zip(networks, (optimizers.policy, optimizers.draft), strict=True):
        moments = jax.eval_shape(optimizer.init, params)
        assert count([x for x in jax.tree.leaves(moments) if x.ndim]) == 2 * count(params)
    assert_fits(config, QWEN3_8B, HEAD, expected, 0.87 * HARDWARE[gpu].memory)


def test_adapters_of_8b_fit_one_gpu():
    """Compare with the GiB in the recipe's docstring."""
    config = load_recipe("qwen3_8b_lora")
    assert config.policy_optimizer.learning_rate == pytest.approx(10 * base.policy_optimizer.learning_rate)
    layers = adapted_layers(partial(init_decoder, QWEN3_8B), config.lora)
    adapters = nn.unbox(jax.eval_shape(partial(init_adapters, layers), jax.random.key(0)))
    head = nn.unbox(shapes_of(init_eagle3, HEAD))
    frozen, trained = 2 * count(nn.unbox(shapes_of(init_decoder, QWEN3_8B))), 4 * (count(adapters) + count(head))
    caches = cache_size(config, QWEN3_8B, HEAD)
    assert [round(size / GIB, 1) for size in (frozen, trained, 2 * trained)] == [15.3, 1.8, 3.6]
    assert round(caches, 1) == 34.7
    # A copy of adapters and head in 16 bits, and 10 GiB for the logits and activations of a rollout.
    assert frozen + 3.5 * trained + (caches + 10) * GIB < 0.95 * HARDWARE["h100"].memory


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen3_30b_a3b", (23, 8, 8, 25)),
        pytest.param("qwen3_235b_a22b", (46, 15, 30, 24), marks=pytest.mark.slow),
    ],
)
def test_the_mesh_named_for_experts_is_large_enough(name: str, expected: tuple[int, ...]):
    config, decoder = load_recipe(name), config_from_hf(PUBLISHED[name])
    sizes = dict(feature_size=3 * decoder.hidden_size, vocab_size=decoder.vocab_size, draft_vocab_size=32_000)
    head = Eagle3Config(**decoder.layer_options(), **sizes)
    assert_fits(config, decoder, head, expected, 0.85 * GPU_BYTES)


def count(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def test_a_recipe_names_its_verifier():
    own = Verifier(VERIFIERS["block"].noise, VERIFIERS["block"].verify)
    with refuses("rollout.verifier:"):
        RunConfig(name="mine", steps=1, rollout=RolloutOptions(verifier=own))


def test_scratch_100m_has_as_many_parameters():
    assert count(abstract_params(partial(init_decoder, load_recipe("scratch_100m").model.architecture))) > 100e6
