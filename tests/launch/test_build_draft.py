"""Runs whose draft starts from a checkpoint: the resulting drafts, and checkpoints that do not fit."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import launch.train
from configs.schema import KINDS as DRAFT_KINDS
from launch.cli.options import parse_run
from launch.errors import ConfigError
from launch.setup.draft import BUILDERS
from launch.setup.drafts.base import FeatureDraft, PublicLayout
from launch.setup.drafts.block import BlockDraft
from launch.setup.drafts.eagle3 import Eagle3Draft
from launch.setup.experiment import Experiment, build_experiment
from models.checkpoints.draft import SavedDraft, save_draft_checkpoint
from models.checkpoints.made_for import MadeFor, state_made_for
from models.config import block_feature_layers, eagle3_feature_layers
from models.decoder import init_decoder
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.drafts.mtp import init_mtp, mtp_config
from models.files import read_json, write_json
from models.hf.config import read_hf_config
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.writer import save_public_draft
from models.hf.load import load_policy
from models.hf.save import save_policy
from models.params import init_params
from specjax.drafters import BlockDrafter, HeadDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import PyTree
from tests.launch.checkpoints import WORDS, write_tokenizer
from tests.launch.programs import ONE_LAYER, Options, argv
from tests.refusals import assert_refused, refuses

# The policy of tests.launch.checkpoints: 9 words, hidden size 16, 2 layers.
SHAPE = dict(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=9)
# It was trained on 20 positions; the run has sequences of 48.
KINDS = dict(rope_theta=77.0, norm_output=True, max_positions=20, param_dtype="bfloat16")
HEAD = Eagle3Config(**SHAPE, **KINDS, draft_vocab_size=4, feature_size=32)
IDS = np.array([0, 6, 7, 8], np.int32)
Write = Callable[..., str]


def drawn(head: Eagle3Config) -> PyTree:
    return init_params(partial(init_eagle3, head), jax.random.key(7), make_mesh(MeshConfig()))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(head: Eagle3Config = HEAD, ids: np.ndarray | None = IDS, layers: tuple[int, ...] = (0, 1)) -> str:
        save_draft_checkpoint(tmp_path / "draft", drawn(head), head, ids, layers)
        return str(tmp_path / "draft")

    return write


def run(options: Options) -> Experiment:
    return build_experiment(parse_run(argv("gsm8k", options), "", ""))


def test_every_kind_that_options_allow_has_a_builder():
    assert tuple(BUILDERS) == tuple(DRAFT_KINDS)


def test_a_run_starts_from_the_saved_draft(shrunk: Options, write: Write):
    path = write()
    unsaid = {name: value for name, value in shrunk.items() if name != "model.feature_layers"}
    networks = run(unsaid | {"--draft.path": path, "--draft.unroll": "2"}).networks
    assert networks.decoder is not None and networks.decoder.feature_layers == (0, 1)
    assert isinstance(networks.draft, Eagle3Draft) and networks.draft.head == replace(HEAD, param_dtype="float32")
    assert isinstance(networks.drafter, HeadDrafter) and networks.drafter.unroll == 2
    np.testing.assert_array_equal(networks.drafter.target_ids, IDS)
    found = networks.params.draft
    assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == "float32" and np.array_equal(x, y), found, drawn(HEAD)))


def test_options_determine_a_random_head(shrunk: Options):
    options = {"--draft.head.num-layers": "2", "--draft.head.sliding-window": "5", "--draft.head.fc-norm": "True"}
    draft = run(shrunk | options | {"--draft.head.norm-output": "True", "--draft.head.qk-norm": "True"}).networks.draft
    head = draft.head
    assert (head.num_layers, head.sliding_window) == (2, 5) and head.qk_norm and head.fc_norm and head.norm_output
    assert not head.norm_before_fc and not head.norm_before_residual


@pytest.mark.parametrize("kind, size", [("dflash", "4"), ("dspark", None)])
def test_a_block_draft_is_saved_and_read_again(shrunk: Options, tmp_path: Path, kind: str, size: str | None):
    path = tmp_path / "draft"
    options = shrunk | {"draft.kind": kind, "--draft.vocab-size": size, "--rollout.draft-length": "3"}
    options |= {"--rollout.draft-lengths": None, "--draft.head.block-size": "3", "--draft.head.num-layers": "1"}
    options |= {"--draft.loss": "kl", "--draft.decay": "0.5", "--draft.rollout-dtype": "int8"}
    fresh = run(options).networks
    drafter = fresh.drafter
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.objective, drafter.decay, drafter.eight_bit) == ("kl", 0.5, "int8")
    assert isinstance(fresh.draft, BlockDraft) and fresh.decoder is not None
    head = fresh.draft.head
    assert (head.block_size, head.num_layers) == (3, 1)
    assert (head.markov_rank > 0) == head.enable_confidence_head == (kind == "dspark")
    # The table has no row after the tokenizer's last token, so that the mask is the row of the stop token.
    assert head.sample_from_anchor == (kind == "dspark") and head.mask_token_id == WORDS.index("<eos>")
    fresh.draft.write(path, fresh.params.draft)
    unsaid = {name: value for name, value in options.items() if name != "model.feature_layers"}
    read = run(unsaid | {"--draft.path": str(path), "--draft.vocab-size": None}).networks
    assert isinstance(read.draft, BlockDraft) and read.draft.head == head
    np.testing.assert_array_equal(read.draft.target_ids, fresh.draft.target_ids)
    assert (fresh.draft.target_ids is None) == (size is None) and head.draft_vocab_size == int(size or head.vocab_size)
    assert read.decoder is not None and read.decoder.feature_layers == fresh.decoder.feature_layers
    jax.tree.map(np.testing.assert_array_equal, read.params.draft, fresh.params.draft)
    with pytest.raises(ConfigError, match=f"draft.kind = eagle3: must be {kind}"):
        run(shrunk | {"--draft.path": str(path)})
    with pytest.raises(ConfigError, match=r"rollout.draft_length = 4: must be at most 3, the draft's block_size"):
        run(options | {"--rollout.draft-length": "4"})
    with pytest.raises(ConfigError, match="dialect = zlab: "):
        fresh.draft.check_writable("zlab")
    if kind == "dflash":
        return
    # DeepSpec's files hold copies of the policy's tables.
    weights = fresh.params.policy
    fresh.draft.write(tmp_path / "deepspec", fresh.params.draft, PublicLayout("deepspec", policy=weights))
    read = run(unsaid | {"--draft.path": str(tmp_path / "deepspec")}).networks
    assert read.draft.head == head and read.params.draft.keys() == fresh.params.draft.keys()
    other = jax.tree.map(lambda x: x[::-1], weights)
    fresh.draft.write(tmp_path / "other", fresh.params.draft, PublicLayout("deepspec", policy=other))
    with pytest.raises(ConfigError, match="other: embed_tokens.weight: differs from the policy's"):
        run(unsaid | {"--draft.path": str(tmp_path / "other")})


def test_row_109_a_fresh_draft_that_no_public_layout_holds_is_said_to_be_so(
    shrunk: Options, capsys: pytest.CaptureFixture[str]
):
    """Its export would fail after the training. A block draft has one: its mask is a row of the policy's."""
    for kind in ("dflash", "dspark"):
        draft = run(shrunk | {"--draft.vocab-size": None, "--draft.kind": kind}).networks.draft
        assert isinstance(draft, FeatureDraft) and draft.only_ours() is None
    assert "only our own layout" not in capsys.readouterr().out
    draft = run(shrunk | {"--draft.head.use-aux-hidden-state": "False", "--draft.head.qk-norm": "True"}).networks.draft
    assert isinstance(draft, FeatureDraft) and str(draft.only_ours()) in capsys.readouterr().out.splitlines()
    assert_refused(str(draft.only_ours()), "draft: only our own layout can hold it...qk_norm...use_aux_hidden_state")


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_row_89_a_small_policy_has_layers_to_read(shrunk: Options, kind: str):
    networks = run(shrunk | {"--draft.kind": kind, "--model.feature-layers": None}).networks
    assert networks.decoder is not None and networks.decoder.feature_layers == (0, 1)
    for count in range(1, 12):
        for layers, most in ((eagle3_feature_layers(count), 3), (block_feature_layers(count), 5)):
            assert layers == tuple(sorted(set(layers))) and len(layers) == min(count, most) and layers[-1] < count


@pytest.mark.slow
def test_a_head_without_stated_layers_reads_eagle3s(tmp_path: Path):
    decoder, mesh = replace(ONE_LAYER, num_layers=8), make_mesh(MeshConfig())
    head = Eagle3Config(**decoder.layer_options(), vocab_size=15, draft_vocab_size=15, feature_size=24)
    save_policy(tmp_path / "policy", init_params(partial(init_decoder, decoder), jax.random.key(3), mesh), decoder)
    save_draft_checkpoint(tmp_path / "draft", drawn(head), head, None, ())
    options = {"--model.path": str(tmp_path / "policy"), "--draft.path": str(tmp_path / "draft")}
    options |= {"--draft.intermediate-size": "None", "--mesh.data": "1"}
    # The recipe does not state layers either.
    assert build_experiment(parse_run(argv("narrow", options), "", "")).networks.decoder.feature_layers == (2, 4, 5)
    asked = options | {"--model.feature-layers": "1 2 3"}
    assert build_experiment(parse_run(argv("narrow", asked), "", "")).networks.decoder.feature_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"--model.feature-layers": "1"}, "model.feature_layers = (1,): ...(0, 1)...draft.path"),
        ({"layers": (0, 2)}, {}, "feature_layers = (0, 2): ...0...1"),
        ({"head": replace(HEAD, vocab_size=10)}, {}, "draft.vocab_size = 10: ...9"),
        ({}, {"--draft.kind": "none"}, "draft.path = ...: ...None...none"),
        ({}, {"--draft.path": "nowhere"}, "draft.path = nowhere: ...config.json"),
        ({}, {"--draft.unroll": "8"}, "draft.unroll = 8: ...1...7"),
    ],
)
def test_refusals(shrunk: Options, write: Write, changes: dict, options: Options, message: str):
    path = write(**changes)
    own = {} if "layers" not in changes else {"--model.feature-layers": " ".join(map(str, changes["layers"]))}
    with refuses(message, ConfigError):
        run(shrunk | {"--draft.path": path} | own | options)


@pytest.mark.parametrize("dialect", [None, "specforge"])
def test_a_head_has_the_length_of_its_policy(shrunk: Options, write: Write, tmp_path: Path, dialect: Dialect | None):
    """Engines use the length in the head's own file, so it must be the policy's."""
    draft = run(shrunk | {"--draft.path": write()}).networks.draft
    assert isinstance(draft, Eagle3Draft) and draft.head.max_positions == 20
    # Layers that both dialects can express.
    draft = replace(draft, decoder=replace(draft.decoder, feature_layers=(1,)))
    draft.write(tmp_path / "out", draft.params, dialect and PublicLayout(dialect))
    found = read_json(tmp_path / "out/config.json")
    fields = found["head"] if dialect is None else found
    assert fields["max_positions" if dialect is None else "max_position_embeddings"] == draft.decoder.max_positions


def test_made_for_is_checked_before_anything_is_built(shrunk: Options, write: Write, tmp_path: Path):
    path, stated = Path(write()), MadeFor("runs/tiny", 16, 2, 1.0, 0.75)
    state_made_for(path, stated)
    options = shrunk | {"--draft.path": str(path)}
    assert run(options).networks.draft.made_for == stated
    write_json(path / "made_for.json", asdict(stated) | {"temperature": "hot"})
    with refuses('made_for.json: temperature = "hot": ', ConfigError):
        launch.train.main(argv("gsm8k", options | {"--out": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


def publish(directory: Path, changes: dict[str, Any], embedding: np.ndarray | None = None) -> Options:
    """Write a head in speculators' dialect, with config.json changed, and optionally a copy of an embedding."""
    save_public_draft(directory, SavedDraft(HEAD, drawn(HEAD), IDS, (0, 1)), "speculators")
    write_json(directory / "config.json", read_json(directory / "config.json") | changes)
    if embedding is not None:
        path = directory / "model.safetensors"
        save_file({**load_file(path), "embed_tokens.weight": embedding}, path)
    return {"--draft.path": str(directory)}


def made_for(architecture: str) -> dict[str, Any]:
    verifier = {"name_or_path": "someone/else", "architectures": [architecture]}
    return {"speculators_config": {"verifier": verifier}}


def test_a_run_starts_from_a_published_draft(shrunk: Options, files: Path, tmp_path: Path):
    embedding = load_file(files / "policy" / "model.safetensors")["model.embed_tokens.weight"]
    published = publish(tmp_path / "draft", made_for("Qwen3ForCausalLM"), embedding)
    networks = run(shrunk | published).networks
    draft = networks.draft
    assert isinstance(draft, Eagle3Draft) and draft.decoder.feature_layers == (0, 1)
    assert (draft.head.rope_theta, draft.head.norm_output) == (77.0, True)
    np.testing.assert_array_equal(getattr(networks.drafter, "target_ids", None), IDS)


@pytest.mark.parametrize(
    ("changes", "embedding", "message"),
    [
        (made_for("LlamaForCausalLM"), None, "config.json: ...LlamaForCausalLM...someone/else...Qwen3ForCausalLM"),
        ({}, np.zeros((9, 16), np.float32), "embed_tokens.weight: "),
        ({"speculators_model_type": "mtp"}, None, 'config.json: speculators_model_type = "mtp": ..."eagle3"'),
    ],
)
def test_published_drafts_that_do_not_fit(
    shrunk: Options, files: Path, tmp_path: Path, changes: dict[str, Any], embedding: np.ndarray | None, message: str
):
    with refuses(message, ConfigError):
        run(shrunk | publish(tmp_path / "draft", changes, embedding))
    with refuses("policy:...config.json", ConfigError):
        run(shrunk | {"--draft.path": str(files / "policy")})


# MTP heads, from the policy's checkpoint or with random weights.
MTP = {"--draft.kind": "mtp", "--model.feature-layers": "0"}


@pytest.fixture
def stitched(files: Path, tmp_path: Path) -> tuple[Path, PyTree]:
    """Return a policy with a head of MiMo's convention, and the head's parameters."""
    decoder, mesh = read_hf_config(files / "policy", ()), make_mesh(MeshConfig())
    config = mtp_config(decoder, "mimo")
    params = init_params(partial(init_mtp, config), jax.random.key(5), mesh)
    save_policy(tmp_path / "policy", load_policy(files / "policy", decoder, mesh), decoder, mtp=(config, params))
    write_tokenizer(tmp_path / "policy", WORDS)
    return tmp_path / "policy", params


def test_the_checkpoints_own_head_is_read(shrunk: Options, stitched: tuple[Path, PyTree]):
    directory, params = stitched
    networks = run(shrunk | MTP | {"--model.path": str(directory), "--draft.unroll": "2"}).networks
    assert networks.decoder.feature_layers == () and networks.draft.read_from == "model.path"
    assert isinstance(networks.drafter, HeadDrafter) and networks.drafter.unroll == 2
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, networks.params.draft, params)))


def test_an_mtp_head_from_random_weights(shrunk: Options, stitched: tuple[Path, PyTree]):
    """The head has random weights, even if the checkpoint holds a head."""
    networks = run(shrunk | MTP | {"--draft.mtp-convention": "deepseek_v3"}).networks
    assert networks.draft.read_from is None and networks.params.draft["head"]["kernel"].shape == (16, len(WORDS))
    directory, held = stitched
    fresh = {"--draft.mtp-convention": "mimo", "--model.path": str(directory)}
    networks = run(shrunk | MTP | fresh).networks
    assert networks.draft.read_from is None
    assert not np.array_equal(networks.params.draft["fc"]["kernel"], held["fc"]["kernel"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--draft.vocab-size": "4"}, "draft.vocab_size = 4:...None...mtp"),
        ({"--draft.path": "somewhere"}, "draft.path = somewhere:...None...mtp"),
        ({"--draft.mtp-convention": "glm"}, "draft.mtp_convention = glm: ...qwen3_next"),
        ({}, "draft.mtp_convention = None:...model.path...MTP"),
        ({"--draft.kind": "eagle3", "--draft.mtp-convention": "mimo"}, "draft.mtp_convention = mimo:...None"),
    ],
)
def test_options_that_an_mtp_head_does_not_allow(shrunk: Options, options: Options, message: str):
    with refuses(message, ConfigError):
        run(shrunk | MTP | options)
