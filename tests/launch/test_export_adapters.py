"""launch.export of a run with adapters: PEFT's files, from which a run can start, and merged weights."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.export
from launch.cli.options import parse_run
from launch.setup.adapters import build_adapters, layers_of, merged_policy
from launch.setup.experiment import Experiment, build_experiment
from models.files import read_json, write_json
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.params import by_path
from specjax.checkpoint import Checkpointer
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.quantization import map_kernels, quantize, rollout_copy
from specjax.train.state import init_train_state
from specjax.types import Params
from tests.launch.programs import Options, Refusal, argv
from tests.refusals import assert_refused, refuses

LORA = {"--lora.rank": "3", "--lora.alpha": "6"}


@pytest.fixture(scope="module")
def saved(shrunk: Options, files: Path) -> tuple[Path, Experiment, Params]:
    """Return a run with adapters that change its policy, its experiment, and its networks."""
    run = files / "run"
    experiment = build_experiment(parse_run(argv("gsm8k", shrunk | LORA), "", ""))
    networks, rng = experiment.networks, np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: x + np.float32(0.02 * rng.standard_normal(x.shape)), networks.params.policy)
    params = replace(networks.params, policy=adapters)
    with Checkpointer(run / "checkpoints", keep=1) as saves:
        extra = {"draft_vocabulary": experiment.draft_vocabulary, "base": networks.base_hash}
        saves.save(1, init_train_state(params, experiment.config, experiment.mesh), {}, extra)
    write_json(run / "config.json", asdict(experiment.config))
    return run, experiment, params


def test_a_run_starts_from_the_adapters_of_another(
    saved: tuple[Path, Experiment, Params], shrunk: Options, tmp_path: Path
):
    run, experiment, params = saved
    out = tmp_path / "out"
    # The directory gives its options and its checkpoint.
    assert launch.export.main([str(run), "--out", str(out), "--part", "adapters"]) == 0
    fields = read_json(out / "adapter_config.json")
    assert (fields["base_model_name_or_path"], fields["r"], fields["lora_alpha"]) == (shrunk["--model.path"], 3, 6)
    again = build_experiment(parse_run(argv("gsm8k", shrunk | {"--lora.path": str(out)}), "", ""))
    jax.tree.map(np.testing.assert_array_equal, again.networks.params.policy, params.policy)
    assert again.networks.base_hash == experiment.networks.base_hash
    decoder = again.networks.decoder
    assert decoder is not None and layers_of(again.config.lora, decoder) == layers_of(experiment.config.lora, decoder)
    with refuses(f"lora.path = {run}: must hold an adapter_config.json"):
        layers_of(replace(again.config.lora, path=str(run)), decoder)
    shapes, _ = build_adapters(again.config.lora, decoder, params.base, again.mesh, None)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params.policy)


def test_the_reference_is_the_policy_of_the_base_directory(saved: tuple[Path, Experiment, Params], shrunk: Options):
    """Without adapters, the forward that gives the reference log-probs has the directory's logits to the bit."""
    _, experiment, params = saved
    directory = Path(shrunk["--model.path"])
    base = load_policy(directory, read_hf_config(directory, ()), make_mesh(MeshConfig()))
    forward, tokens = jax.jit(experiment.networks.policy.apply), jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 8
    found, expected = (forward(weights, tokens, jnp.zeros(2, jnp.int32)).logits for weights in (params.base, base))
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(expected).std() > 0


@pytest.mark.parametrize("dtype", ["kept", "bfloat16"])
def test_the_policy_is_merged_and_rounded_once(
    saved: tuple[Path, Experiment, Params],
    shrunk: Options,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dtype: str,
):
    run, experiment, params = saved
    own = {"--checkpoint": str(run), "--out": str(tmp_path / "out"), "--param-dtype": dtype}
    assert launch.export.main(argv("gsm8k", shrunk | own)) == 0
    written = by_path(load_policy(tmp_path / "out", read_hf_config(tmp_path / "out", ()), make_mesh(MeshConfig())))
    base, adapters, decoder = by_path(params.base), by_path(params.policy), experiment.networks.decoder
    assert decoder is not None
    lost, elements = 0, 0
    layers = {layer.path: layer for layer in layers_of(experiment.config.lora, decoder)}
    for path, found in written.items():
        expected = unchanged = np.asarray(base[path])
        if path[-1] == "kernel" and path[:-1] in layers:
            a, b = (np.asarray(adapters[*path[:-1], name]) for name in ("lora_a", "lora_b"))
            expected = unchanged + 2 * np.tensordot(a, b, 1)
            lost += int((np.asarray(found) == unchanged.astype(found.dtype)).sum())
            elements += unchanged.size
        atol = 1e-6 if dtype == "kept" else 2**-8 * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=atol)
    assert (lost > 0) == (dtype == "bfloat16")
    assert f"adapters merged in float32, rounded once: {lost / elements:.2%} of the elements" in capsys.readouterr().out


def test_a_base_in_8_bits_is_merged(saved: tuple[Path, Experiment, Params]):
    """The policy is the 8-bit weights and the adapters, so it is they that are merged."""
    *_, params = saved
    quantized = rollout_copy(params.base, jnp.dtype("float32"), "int8")
    rounded = map_kernels(lambda x, inputs: quantize(x, inputs, "int8").dequantized(), lambda x: x, params.base)
    found, expected = (merged_policy(replace(params, base=base), "float32")[0] for base in (quantized, rounded))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_run_without_adapters_has_none_to_write(refusal: Refusal, shrunk: Options, tmp_path: Path):
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    given = shrunk | {"--checkpoint": "run", "--out": "out", "--part": "adapters"}
    assert_refused(refusal(launch.export.main, argv("gsm8k", given)), "part = adapters: must be policy or draft")
