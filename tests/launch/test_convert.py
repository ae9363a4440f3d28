import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.convert import main
from launch.errors import ConfigError
from models.checkpoints.draft import load_draft_checkpoint
from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.files import CARRIED, CARRIED_TENSORS, read_json
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.eagle3_checkpoints import LAYERS, REDUCED, VOCAB, WIDTH, Public
from tests.models.parity import GOLDEN
from tests.models.test_block_files import PUBLIC as BLOCKS
from tests.refusals import refuses


def tensors(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


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


@pytest.mark.parametrize("name, other", [("zlab", "speculators"), ("speculators", None), ("deepspec", "speculators")])
def test_block_drafts_there_and_back(tmp_path: Path, name: str, other: str | None):
    """A map of the vocabulary and copies of the policy's tables come back. Another dialect gets no copies."""
    BLOCKS[name].write(tmp_path / "draft")
    draft, ours, back, further = (str(tmp_path / name) for name in ("draft", "ours", "back", "further"))
    assert main([draft, ours]) == 0
    assert main([ours, back, "--dialect", name]) == 0
    assert read_json(tmp_path / "back/config.json") == BLOCKS[name].fields
    assert tensors(tmp_path / "back") == tensors(tmp_path / "draft")
    with refuses("...zlab" if name != "zlab" else "...deepspec", ConfigError):
        main([ours, further, "--dialect", "zlab" if name != "zlab" else "deepspec"])
    if other is not None:
        assert main([ours, further, "--dialect", other, "--verifier", "me", "--param-dtype", "bfloat16"]) == 0
        fields, found = read_json(tmp_path / "further/config.json"), load_file(tmp_path / "further/model.safetensors")
        assert fields["speculators_config"]["verifier"]["name_or_path"] == "me"
        assert {x.dtype.name for x in found.values()} == {"bfloat16"} and "embed_tokens.weight" not in found


def test_what_a_layout_states_of_the_policy_must_be_known(tmp_path: Path):
    """The number of its layers comes from made_for.json, its tables from the files that the draft was read from."""
    ours = {}
    for name in ("zlab", "deepspec"):
        BLOCKS[name].write(tmp_path / name)
        ours[name] = tmp_path / f"our-{name}"
        assert main([str(tmp_path / name), str(ours[name])]) == 0
        for kept in (CARRIED, CARRIED_TENSORS):
            (ours[name] / kept).unlink(missing_ok=True)
        with refuses("num_target_layers = None:...made_for.json", ConfigError):
            main([str(ours[name]), str(tmp_path / "out"), "--dialect", name])
        state_made_for(ours[name], MadeFor("runs/tiny", 16, 8, 1.0, 0.74))
    assert main([str(ours["zlab"]), str(tmp_path / "out"), "--dialect", "zlab"]) == 0
    assert read_json(tmp_path / "out/config.json")["num_target_layers"] == 8
    with refuses("embed_tokens.weight: missing...launch.export", ConfigError):
        main([str(ours["deepspec"]), str(tmp_path / "none"), "--dialect", "deepspec"])


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


def test_refusals(tmp_path: Path):
    Public(dialect="speculators", num_layers=2).write(tmp_path / "draft")
    policy, draft, ours, out = str(GOLDEN / "llama"), *(str(tmp_path / name) for name in ("draft", "ours", "out"))
    main([draft, ours])
    for arguments, message in [
        ([str(tmp_path / "nowhere"), out], "nowhere/config.json: "),
        ([policy, out], f"source = {policy}: ...EAGLE-3...--model.path...launch.export...Hugging Face's layout"),
        ([draft, draft], "draft: "),
        ([ours, out], "dialect = unsaid: "),
        ([ours, out, "--dialect", "specforge"], "num_layers = 2: "),
        ([draft, out, "--dialect", "specforge"], "dialect = specforge: "),
        ([draft, out, "--verifier", "me"], "verifier = me: "),
        ([ours, out, "--dialect", "specforge", "--verifier", "me"], "verifier = me: "),
    ]:
        with refuses(message, ConfigError):
            main(arguments)
    (tmp_path / "draft/model.safetensors").unlink()
    with refuses("draft:...model.safetensors", ConfigError):
        main([draft, out])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "ours"]
