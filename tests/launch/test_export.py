"""launch.export: checkpoints of a run are written in public layouts."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import launch.export
from launch.cli.options import parse_run
from launch.errors import ConfigError
from launch.run.export import made_for
from launch.setup.experiment import Experiment, build_experiment
from models.checkpoints.draft import load_draft_checkpoint
from models.checkpoints.made_for import MadeFor, read_made_for
from models.files import read_json, write_json
from models.hf.config import read_hf_config
from models.hf.drafts.mtp import load_mtp
from models.hf.drafts.reader import load_public_draft
from models.hf.load import load_policy
from models.params import by_path
from specjax.checkpoint import Checkpointer
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.train.state import init_train_state
from specjax.types import PyTree
from tests.launch.programs import Options, Refusal, argv
from tests.launch.run_directories import write_lines
from tests.refusals import assert_refused, refuses

ONE = make_mesh(MeshConfig())
PREDICTED, PREDICTED_AT = "draft/predicted_acceptance", {1: 0.25, 2: 0.75}
LAW = {"--rollout.law.temperature": "0.6"}
REDUCED = {"--draft.vocab-size": "4"}
MTP = {"--draft.kind": "mtp", "--draft.mtp-convention": "mimo", "--model.feature-layers": "0"}


def save(run: Path, options: Options) -> Experiment:
    """Return a run whose saved networks differ from its initial ones, and the experiment with them."""
    experiment = build_experiment(parse_run(argv("gsm8k", options), "", ""))
    trained = jax.tree.map(lambda x: 2 * x, experiment.networks.params)
    state = init_train_state(trained, experiment.config, experiment.mesh)
    with Checkpointer(run / "checkpoints", keep=2) as saves:
        for step in (1, 2):
            saves.save(step, state, {}, {"draft_vocabulary": experiment.draft_vocabulary})
    write_json(run / "config.json", asdict(experiment.config))
    write_lines(run / "metrics.jsonl", [{"step": step, PREDICTED: PREDICTED_AT.get(step)} for step in (1, 2, 3)])
    return experiment


def stated_by(run: Path, step: int = 2) -> MadeFor:
    return MadeFor(str(run), 16, 2, 0.6, PREDICTED_AT[step])


def same(found: PyTree, started: PyTree) -> bool:
    found, started = by_path(found), by_path(started)
    return found.keys() == started.keys() and all(np.array_equal(x, 2 * started[name]) for name, x in found.items())


@pytest.fixture(scope="module")
def saved(shrunk: Options, files: Path) -> tuple[Path, Experiment]:
    return files / "run", save(files / "run", shrunk | REDUCED | LAW)


@pytest.mark.parametrize(("dialect", "verifier"), [("ours", None), ("speculators", None), ("speculators", "me/mine")])
def test_a_head(saved: tuple[Path, Experiment], shrunk: Options, tmp_path: Path, dialect: str, verifier: str | None):
    run, experiment = saved
    own = {"--checkpoint": str(run), "--out": str(tmp_path / "out")}
    own |= {"--part": "draft", "--dialect": dialect, "--verifier": verifier}
    assert launch.export.main(argv("gsm8k", shrunk | REDUCED | own)) == 0
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}, "who may read other files may read these"
    load: Any = load_draft_checkpoint if dialect == "ours" else load_public_draft
    _, params, ids, layers = load(tmp_path / "out", ONE)
    assert same(params, experiment.networks.params.draft) and layers == (0, 1)
    assert ids.tolist() == experiment.draft_vocabulary
    assert read_made_for(tmp_path / "out") == stated_by(run)
    if dialect == "speculators":
        # The run's policy, which differs from the one at model.path.
        stated = read_json(tmp_path / "out/config.json")["speculators_config"]["verifier"]
        name = verifier or str(run)
        assert stated == {"name_or_path": name, "architectures": ["Qwen3ForCausalLM"]}


def test_a_head_states_the_acceptance_recorded_in_the_run(saved: tuple[Path, Experiment], tmp_path: Path):
    run, decoder = Path(shutil.copytree(saved[0], tmp_path / "run")), saved[1].networks.decoder
    assert made_for(run, 1, decoder) == stated_by(run, 1) != stated_by(run) == made_for(run, "newest", decoder)
    write_lines(run / "metrics.jsonl", [{"step": 1, PREDICTED: 0.5}, {"step": 2, PREDICTED: None}])
    assert made_for(run, "newest", decoder) == replace(stated_by(run), predicted_acceptance=None)
    (run / "metrics.jsonl").unlink()
    assert made_for(run, "newest", decoder) is None


def test_a_policy_is_as_published(shrunk: Options, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Other files and fields are copied. A separate output layer stays one, even if the config ties it."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(files / "policy", source)
    write_json(source / "generation_config.json", {"eos_token_id": [0, 1]})
    write_json(source / "config.json", read_json(source / "config.json") | {"bos_token_id": 1, "eos_token_id": 0})
    tensors = load_file(source / "model.safetensors")
    head = {"lm_head.weight": 3 * tensors["model.embed_tokens.weight"]}
    save_file(tensors | head, source / "model.safetensors", metadata={"format": "pt"})
    options = shrunk | {"--model.path": str(source)}
    save(tmp_path / "run", options)
    said = capsys.readouterr().out.splitlines()[0]
    assert_refused(said, f"model.path = {source}: tie_word_embeddings = true...untied")
    own = {"--checkpoint": str(tmp_path / "run"), "--out": str(out)}
    assert launch.export.main(argv("gsm8k", options | own)) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == (tensors | head).keys()
    assert all(np.array_equal(written[name], 2 * x) for name, x in (tensors | head).items())
    fields = read_json(out / "config.json")
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["tie_word_embeddings"]) == (1, 0, False)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    other = options | own | {"--out": str(tmp_path / "other"), "--rollout.stop-tokens": "3"}
    with refuses("rollout.stop_tokens = [0, 1, 3]: ...[0, 1]", ConfigError):
        launch.export.main(argv("gsm8k", other))


@pytest.mark.slow
def test_a_policy_and_its_mtp_head(shrunk: Options, files: Path, tmp_path: Path):
    options = shrunk | MTP | LAW
    experiment = save(tmp_path / "run", options)
    own = {"--checkpoint": str(tmp_path / "run"), "--out": str(tmp_path / "out")}
    assert launch.export.main(argv("gsm8k", shrunk | MTP | own)) == 0
    config = read_hf_config(tmp_path / "out", ())
    assert same(load_policy(tmp_path / "out", config, ONE), experiment.networks.params.policy)
    found = load_mtp(tmp_path / "out", config, ONE)
    assert found is not None and same(found[1], experiment.networks.params.draft)
    assert read_made_for(tmp_path / "out") == stated_by(tmp_path / "run")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (files / "policy/tokenizer.json").read_bytes()
    # A run can start from it with its head, also in a narrower dtype.
    own_head = options | {"--draft.mtp-convention": None, "--model.path": str(tmp_path / "out")}
    again = build_experiment(parse_run(argv("gsm8k", own_head), "", ""))
    assert same(again.networks.params.draft, experiment.networks.params.draft)
    own |= {"--out": str(tmp_path / "narrow"), "--param-dtype": "bfloat16"}
    assert launch.export.main(argv("gsm8k", shrunk | MTP | own)) == 0
    assert read_hf_config(tmp_path / "narrow", ()).param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--out": None}, "out = None: "),
        ({"--out": "."}, "out = .:"),
        ({"--dialect": "specforge"}, "dialect = specforge: "),
        ({"--verifier": "me"}, "verifier = me: "),
        (MTP | {"--part": "draft"}, "draft.kind = mtp: "),
        ({"--part": "draft", "--dialect": "specforge"}, "dialect = specforge:...feature_layers...(0, 1)"),
    ],
)
def test_refusals(refusal: Refusal, shrunk: Options, tmp_path: Path, options: dict[str, Any], message: str):
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    given = shrunk | {"--checkpoint": "run", "--out": "out"} | options
    assert_refused(refusal(launch.export.main, argv("gsm8k", given)), message)
