import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.cli.errors import ConfigError
from launch.convert import main
from models.checkpoints.draft import load_draft_checkpoint
from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.checkpoints.policy import load_policy_checkpoint
from models.files import read_json
from models.hf.config import read_hf_config
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.eagle3_checkpoints import LAYERS, REDUCED, VOCAB, WIDTH, Public
from tests.models.mtp_reference import write_checkpoint
from tests.models.parity import FEATURE_LAYERS, GOLDEN
from tests.refusals import assert_refused, refuses

FEATURES = ["--feature-layers", "1", "2", "3"]


def tensors(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama", directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def test_there_and_back(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main([str(source), str(ours), *FEATURES]) == 0
    assert main([str(ours), str(back)]) == 0
    assert tensors(back).keys() == {"model.safetensors"}
    config = read_hf_config(source, FEATURE_LAYERS)
    assert load_policy_checkpoint(ours, make_mesh(MeshConfig()))[0] == config
    assert read_hf_config(back, FEATURE_LAYERS) == config
    fields = json.loads((back / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (1, 2)
    for directory in (ours, back):
        assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"
        assert (directory / "generation_config.json").exists()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{source} -> {ours}") and second.startswith(f"{ours} -> {back}")


def test_a_separate_output_layer_is_kept_even_if_the_config_ties_it(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
):
    """Other libraries load such a checkpoint in the same way. The copies state that nothing is tied."""
    ours, back = tmp_path / "ours", tmp_path / "back"
    fields = json.loads((source / "config.json").read_text())
    assert not fields["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    assert main([str(source), str(ours), *FEATURES]) == main([str(ours), str(back)]) == 0
    assert_refused(capsys.readouterr().out.splitlines()[0], f"source = {source}: tie_word_embeddings...untied")
    assert not read_hf_config(back, FEATURE_LAYERS).tie_embeddings
    stored, written = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert np.array_equal(written["lm_head.weight"], stored["lm_head.weight"])


def test_an_mtp_head_is_converted_with_its_policy(tmp_path: Path):
    source, ours, back = tmp_path / "source", tmp_path / "ours", tmp_path / "back"
    written = write_checkpoint(source, "deepseek_v3")
    stated = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)
    state_made_for(source, stated)
    main([str(source), str(ours), "--feature-layers", "0"])
    main([str(ours), str(back)])
    found = load_file(back / "model.safetensors")
    assert found.keys() == written.keys()
    assert read_made_for(ours) == read_made_for(back) == stated
    assert all(found[name].tobytes() == x.tobytes() for name, x in written.items())


def test_param_dtype_and_file_size(tmp_path: Path, source: Path):
    main([str(source), str(tmp_path / "ours"), *FEATURES, "--param-dtype", "bfloat16"])
    config, _ = load_policy_checkpoint(tmp_path / "ours", make_mesh(MeshConfig()))
    assert (config.dtype, config.param_dtype) == ("float32", "bfloat16")
    main([str(tmp_path / "ours"), str(tmp_path / "back"), "--max-file-bytes", "10000"])
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert len(tensors(tmp_path / "back")) > 1
    main([str(tmp_path / "ours"), str(tmp_path / "wide"), "--param-dtype", "float32"])
    assert json.loads((tmp_path / "wide/config.json").read_text())["torch_dtype"] == "float32"
    assert {x.dtype for x in load_file(tmp_path / "wide/model.safetensors").values()} == {np.dtype("float32")}


@pytest.mark.parametrize("public", [Public(), Public(dialect="speculators", flags=("norm_output",), num_layers=2)])
def test_drafts_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], public: Public):
    beside: dict[str, np.ndarray | None] = {"embed_tokens.weight": np.ones((VOCAB, WIDTH), np.float32), "t2d": None}
    public.write(tmp_path / "draft", **beside)
    stated = MadeFor("runs/tiny", 16, 8, 1.0, 0.74)
    state_made_for(tmp_path / "draft", stated)
    draft, ours, back = (str(tmp_path / name) for name in ("draft", "ours", "back"))
    assert main([draft, ours]) == 0
    assert main([ours, back, "--dialect", public.dialect]) == 0
    assert read_json(tmp_path / "back/config.json") == public.fields()
    assert tensors(tmp_path / "back") == tensors(tmp_path / "draft")
    assert read_made_for(tmp_path / "ours") == read_made_for(tmp_path / "back") == stated
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{draft} -> {ours}") and second.startswith(f"{ours} -> {back}")


@pytest.mark.parametrize("public", [Public(), Public(dialect="speculators")])
def test_a_draft_is_cast_on_export(tmp_path: Path, public: Public):
    """Its config.json states the new dtype and the policy's name, and is otherwise unchanged."""
    public.write(tmp_path / "draft", **{"embed_tokens.weight": np.ones((VOCAB, WIDTH), np.float32)})
    draft, ours, back = (str(tmp_path / name) for name in ("draft", "ours", "back"))
    main([draft, ours])
    verifier = ["--verifier", "me"] if public.dialect == "speculators" else []
    main([ours, back, "--dialect", public.dialect, "--param-dtype", "bfloat16", *verifier])
    text = json.dumps(public.fields()).replace('"torch_dtype": "float32"', '"torch_dtype": "bfloat16"')
    assert read_json(tmp_path / "back/config.json") == json.loads(text.replace("someone/tiny", "me"))
    floats = {x.dtype.name for x in load_file(tmp_path / "back/model.safetensors").values()} - {"int64", "bool"}
    assert floats == {"bfloat16"}
    # A conversion on import gives the same.
    main([draft, str(tmp_path / "narrow"), "--param-dtype", "bfloat16"])
    main([str(tmp_path / "narrow"), str(tmp_path / "again"), "--dialect", public.dialect, *verifier])
    assert tensors(tmp_path / "again") == tensors(tmp_path / "back")
    assert read_json(tmp_path / "again/config.json") == read_json(tmp_path / "back/config.json")


def test_a_draft_to_the_other_dialect(tmp_path: Path):
    Public().write(tmp_path / "draft")
    draft, ours, other, again = (str(tmp_path / name) for name in ("draft", "ours", "other", "again"))
    main([draft, ours, "--param-dtype", "bfloat16"])
    main([ours, other, "--dialect", "speculators", "--verifier", "someone/policy"])
    fields = read_json(tmp_path / "other/config.json")
    assert fields["speculators_config"]["verifier"]["name_or_path"] == "someone/policy"
    assert (fields["torch_dtype"], fields["eagle_aux_hidden_state_layer_ids"]) == ("bfloat16", list(LAYERS))
    main([other, again])
    config, _, ids, layers = load_draft_checkpoint(tmp_path / "again", make_mesh(MeshConfig()))
    assert (config.param_dtype, layers) == ("bfloat16", LAYERS)
    np.testing.assert_array_equal(ids, REDUCED)


def test_refusals(tmp_path: Path, source: Path):
    Public(dialect="speculators", num_layers=2).write(tmp_path / "draft")
    policy, draft, ours, out = (str(tmp_path / name) for name in ("source", "draft", "ours", "out"))
    main([draft, ours])
    for arguments, message in [
        ([str(tmp_path / "nowhere"), out], "nowhere/config.json: "),
        ([policy, out], "source/config.json: num_layers = 4: ...feature_layers"),
        ([policy, out, "--feature-layers", "1", "1"], "feature_layers"),
        ([policy, policy, *FEATURES], "source: "),
        ([ours, out], "dialect = unsaid: "),
        ([ours, out, "--dialect", "specforge"], "num_layers = 2: "),
        ([draft, out, "--dialect", "specforge"], "dialect = specforge: "),
        ([policy, out, *FEATURES, "--verifier", "me"], "verifier = me: "),
        ([draft, out, *FEATURES], "feature_layers = (1, 2, 3): "),
        ([ours, out, "--max-file-bytes", "9"], "max_file_bytes = 9: "),
        ([policy, out, *FEATURES, "--max-file-bytes", "9"], "max_file_bytes = 9: "),
        ([ours, out, "--dialect", "specforge", "--verifier", "me"], "verifier = me: "),
    ]:
        with refuses(message, ConfigError):
            main(arguments)
    (source / "model.safetensors").unlink()
    with refuses("source:...model.safetensors", ConfigError):
        main([policy, out, *FEATURES])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "ours", "source"]
