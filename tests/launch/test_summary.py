"""The lines that a run prints at its start."""

import re
from dataclasses import replace

import pytest

from configs.override import override
from launch.predict import outlook
from launch.predict.outlook import describe_memory, expected_on_cpus
from launch.run.summary import next_look, summarize
from launch.setup.experiment import Experiment, abstract_experiment, build_experiment
from models.config import DecoderConfig
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.launch.programs import SMALLEST, changes


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return build_experiment(override(SMALLEST, changes("--model.feature-layers 0")))


def of(experiment: Experiment, *lines: str) -> Experiment:
    return replace(experiment, config=override(experiment.config, changes(*lines)))


def test_row_55_six_lines_say_what_the_run_is(experiment: Experiment):
    model, data, draft, devices, step, memory = summarize(experiment, continuing=False)
    assert model.startswith("model: random weights, 712 parameters; computes in float32")
    assert data == "data: 20 prompts to train on, 4 held out"
    assert draft.startswith("draft: EAGLE-3 head, 856 parameters, untrained; every round drafts 2 tokens, most in")
    assert devices == "devices: 1 x cpu trains"
    assert (
        step == "step: 2 prompts x 2 samples = 4 sequences of up to 10 + 7 tokens; 1 step; learning rate 1e-06; "
        "the update computes a prompt once for 2 samples"
    )
    assert memory.startswith("memory: about 2.5 GiB of this machine's ") and "WARNING" not in memory


def test_row_105_a_machine_without_the_memory_of_a_run_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    """SmolLM2-135M: parameters, moments and gradient are 2.4 GB."""
    sizes = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30)
    shape = DecoderConfig(**sizes, num_heads=9, num_kv_heads=3, head_dim=64)
    config = override(SMALLEST, {"model.architecture": shape, "model.dtype": "bfloat16", "draft.kind": "dspark"})
    config = override(config, {"data.prompts": 2, "rollout.group_size": 4, "data.max_prompt_tokens": 80})
    config = override(config, {"rollout.max_new_tokens": 64, "rollout.draft_length": 4})
    whole = abstract_experiment(config, make_mesh(MeshConfig()))
    for present, warns in ((8 * 10**9, True), (16 * 10**9, False)):
        monkeypatch.setattr(outlook, "host_memory", lambda present=present: present)
        line = describe_memory(whole)
        assert line.startswith(
            f"memory: about 9.1 GiB of this machine's {present / 2**30:.1f} GiB (2.5 for the process"
        )
        assert ("WARNING: the system may kill the process" in line) is warns
    unsaved = replace(whole, config=override(whole.config, {"checkpoint.every": 0}))
    assert sum(expected_on_cpus(whole).values()) - sum(expected_on_cpus(unsaved).values()) > 2 * 10**9


@pytest.mark.parametrize(
    ("options", "pulls"),
    [(("--lora.path adapters", "--loss.kl-coefficient 0.1"), True), (("--lora.path adapters",), False)]
    + [(("--lora.rank 2", "--loss.kl-coefficient 0.1"), False)],
)
def test_row_78_the_line_of_the_model_says_what_kl_pulls_back_to(
    experiment: Experiment, options: tuple[str, ...], pulls: bool
):
    line = summarize(of(experiment, *options), continuing=False)[0]
    assert ("KL is measured against the base without these adapters, and pulls back to it" in line) == pulls


@pytest.mark.parametrize(("limit", "width"), [(10, 10), (16, 16), (1024, 16)])
def test_rows_are_as_wide_as_the_longest_prompt_needs(experiment: Experiment, limit: int, width: int):
    longer = of(experiment, f"--data.max-prompt-tokens {limit}")
    assert f"sequences of up to {width} + 7 tokens" in summarize(longer, continuing=False)[-2]
    assert {longer.prompt_width, longer.abstract_prompts(2).tokens.shape[1], longer.phases[0].window - 7} == {width}
    assert next(longer.train_batches()).tokens.shape[1] == width


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            "--rollout.draft-lengths 0 2",
            "untrained; drafts one of 0, 2 tokens...measures costs once...distill.steps = 512 distils it first",
        ),
        (
            "--rollout.draft-lengths 0 2 --distill.steps 5",
            "distilled before RL on 4,096 answers (1,024 batches; minutes...; drafts one of 0, 2 tokens...begins "
            "without, while the first step measures acceptance, and measures costs once drafts may pay",
        ),
        ("--rollout.draft-lengths 1 2", "untrained; drafts one of 1, 2 tokens"),
        ("--rollout.draft-length 0", "untrained; drafting is off (rollout.draft_length = 0)"),
        ("--distill.steps 5", "distilled before RL on ...; every round drafts 2 tokens"),
        ("--draft.lookup.kind ngram", "EAGLE-3 head and lookup in the sequence"),
    ],
)
def test_row_49_the_line_of_the_draft_says_whether_it_drafts_and_why(
    experiment: Experiment, options: str, expected: str
):
    line = summarize(of(experiment, options), continuing=False)[2]
    for part in expected.split("..."):
        assert part in line
    assert ("begins without" in line) == ("lengths 0" in options)
    assert ("measures costs once" in line) == ("lengths 0" in options)


def test_a_resumed_run_does_not_call_its_draft_untrained(experiment: Experiment):
    line = summarize(of(experiment, "--rollout.draft-lengths 0 2"), continuing=True)[2]
    assert "as the run has trained it; drafts one of 0, 2" in line
    assert not re.search("untrained|begins|distil", line)


def test_a_look_at_an_unused_draft_offers_a_distillation(experiment: Experiment):
    # 4,096 answers are 1,024 steps of 4 sequences.
    said = next_look(experiment, 0.5)
    assert (
        "trained and measured again, at least once in 32 steps" in said
        and "distill.steps = 512 needs about 17 min 4 s for that; fewer answers (distill.answers = 4,096) need" in said
    )
    frozen = next_look(of(experiment, "--draft-training.mode frozen --distill.steps 5"), 0.5)
    assert frozen == "The draft is measured again, at least once in 32 steps"
