"""launch.export of a run with adapters: PEFT's files, from which a run can start, and merged weights."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.export
from launch.cli.options import parse_run
from launch.run.export import ExportArgs, export
from launch.setup.adapters import base_of, build_adapters, layers_of, merged_policy, other_base
from launch.setup.experiment import Experiment, build_experiment
from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.files import read_json, write_json
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.params import by_path
from specjax.checkpoint import Checkpointer
from specjax.checkpoint_integrity import fingerprint
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.quantization import map_kernels, quantize, quantized, rollout_copy
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
    saved: tuple[Path, Experiment, Params], shrunk: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Nothing is said: the base is the one that the files were made for."""
    run, experiment, params = saved
    out = tmp_path / "out"
    # The directory gives its options and its checkpoint.
    assert launch.export.main([str(run), "--out", str(out), "--part", "adapters"]) == 0
    fields = read_json(out / "adapter_config.json")
    assert (fields["base_model_name_or_path"], fields["r"], fields["lora_alpha"]) == (shrunk["--model.path"], 3, 6)
    again = build_experiment(parse_run(argv("gsm8k", shrunk | {"--lora.path": str(out)}), "", ""))
    jax.tree.map(np.testing.assert_array_equal, again.networks.params.policy, params.policy)
    assert again.networks.base_hash == experiment.networks.base_hash
    assert "adapters of a base" not in (said := capsys.readouterr().out) and "lora.path" not in said
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
    eight_bits = rollout_copy(params.base, jnp.dtype("float32"), "int8")
    rounded = map_kernels(lambda x, inputs: quantize(x, inputs, "int8").dequantized(), lambda x: x, params.base)
    found, expected = (merged_policy(replace(params, base=base), "float32")[0] for base in (eight_bits, rounded))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_row_71_files_of_an_8_bit_base_say_so(
    saved: tuple[Path, Experiment, Params], shrunk: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """adapter_config.json can only name the full-precision weights."""
    _, experiment, params = saved
    networks, config = experiment.networks, experiment.config
    base = quantized(jax.tree.map(jnp.copy, params.base), "int8")
    networks = replace(networks, params=replace(params, base=base), base_hash=(base_hash := fingerprint(base)))
    eight = replace(experiment, networks=networks, config=replace(config, lora=replace(config.lora, base_dtype="int8")))
    with Checkpointer(tmp_path / "run/checkpoints", keep=1) as saves:
        extra = {"draft_vocabulary": eight.draft_vocabulary, "base": base_hash}
        saves.save(1, init_train_state(networks.params, eight.config, eight.mesh), {}, extra)
    path = str(tmp_path / "adapters")
    export(Path(path), eight, ExportArgs(checkpoint=str(tmp_path / "run"), part="adapters"))
    said = capsys.readouterr().out
    assert "adapters of a base in int8: the weights that adapter_config.json names are in float32" in said
    assert "--lora.base-dtype int8" in said and "--part policy" in said
    decoder = networks.decoder
    assert decoder is not None
    stated = base_of(eight.config, decoder, base_hash)
    assert read_made_for(Path(path)) == stated and (stated.dtype, stated.policy) == ("int8", shrunk["--model.path"])
    read, line = shrunk | {"--lora.path": path}, f"lora.path = {path}: made for {stated}, but read beside "
    for options, differs in ((read, True), (read | {"--lora.base-dtype": "int8"}, False)):
        build_experiment(parse_run(argv("gsm8k", options), "", ""), training=False)
        assert (line in capsys.readouterr().out) == differs


BASE = MadeFor("org/name", 16, 2, dtype="bfloat16", hash="1" * 8)
COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("stated", "named", "base", "differs"),
    [
        (None, {}, {}, False),
        (None, {"base_model_name_or_path": "org/name"}, {}, False),
        (None, {"base_model_name_or_path": "org/name", "revision": "main"}, {"policy": f"org/name@{COMMIT}"}, False),
        (None, {"base_model_name_or_path": "org/name", "revision": COMMIT}, {"policy": f"org/name@{COMMIT}"}, False),
        (None, {"base_model_name_or_path": "org/name", "revision": COMMIT}, {"policy": f"org/name@{'0' * 40}"}, True),
        (None, {"base_model_name_or_path": "org/other"}, {}, True),
        (None, {"base_model_name_or_path": "org/other"}, {"policy": None}, True),
        (None, {"base_model_name_or_path": "/models/name"}, {"policy": "/models/./name"}, False),
        (None, {"base_model_name_or_path": "/"}, {"policy": "/usr"}, True),
        # Of a copy in a directory, or of one on another machine, nothing is known.
        (None, {"base_model_name_or_path": "org/name"}, {"policy": "/models/name"}, False),
        (None, {"base_model_name_or_path": "/models/name"}, {}, False),
        (None, {"base_model_name_or_path": "/models/name"}, {"policy": "/usr"}, False),
        (None, {"base_model_name_or_path": ["x"]}, {}, False),
        # PEFT's files do not state that the base had 8 bits.
        (None, {"base_model_name_or_path": "org/name"}, {"dtype": "int8"}, True),
        # Equal weights may have two names, and one name other weights.
        ({}, {"base_model_name_or_path": "org/other"}, {}, False),
        ({"hash": "2" * 8}, {"base_model_name_or_path": "org/name"}, {}, True),
        ({"hash": None, "dtype": "float32"}, {"base_model_name_or_path": "org/name"}, {}, True),
        ({"hash": None}, {"base_model_name_or_path": "org/name"}, {}, False),
    ],
)
def test_row_77_adapters_for_another_base_are_named(
    tmp_path: Path, stated: dict | None, named: dict, base: dict, differs: bool
):
    write_json(tmp_path / "adapter_config.json", named)
    state_made_for(tmp_path, None if stated is None else replace(BASE, **stated))
    line = other_base(str(tmp_path), replace(BASE, **base))
    assert (line is not None) == differs
    if line is not None:
        assert line.startswith(f"lora.path = {tmp_path}: made for ") and "\n" not in line
        for name in {named["base_model_name_or_path"], base.get("policy", "org/name")} - {None}:
            assert name in line


def test_a_run_without_adapters_has_none_to_write(refusal: Refusal, shrunk: Options, tmp_path: Path):
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    given = shrunk | {"--checkpoint": "run", "--out": "out", "--part": "adapters"}
    assert_refused(refusal(launch.export.main, argv("gsm8k", given)), "part = adapters: must be policy or draft")
