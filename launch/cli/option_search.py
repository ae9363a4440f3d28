"""Search of options by a name or a word, for messages about unknown options and for `--help WORD`."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from launch.cli.fields import Field

# Most options that a message names.
MOST_NAMED = 6
# Names in TRL, verl, NeMo RL and others, by the option here. An option without a section stands for all that end so.
SYNONYMS = {
    "--temperature": "temp",
    "--algorithm": "adv-estimator advantage-estimator loss-type",
    "--steps": "max-steps num-steps train-steps max-num-steps total-training-steps num-train-epochs total-epochs",
    "--out": "output output-dir save-path checkpoint-dir default-local-dir run-name experiment-name",
    "--resume": "resume-from-checkpoint resume-mode",
    "--print-every": "logging-steps log-interval",
    "--microbatches": "gradient-accumulation-steps micro-batch-size train-micro-batch-size ppo-micro-batch-size "
    "ppo-micro-batch-size-per-gpu",
    "--model.path": "model model-name model-name-or-path model-path policy-model",
    "--model.remat": "gradient-checkpointing enable-gradient-checkpointing activation-checkpointing",
    "--model.dtype": "bf16 precision torch-dtype",
    "--draft.path": "draft-model speculative-model",
    "--rollout.draft-length": "num-speculative-tokens speculative-num-steps",
    "--rollout.group-size": "n num-generations num-generations-per-prompt n-samples-per-prompt samples-per-prompt "
    "num-return-sequences",
    "--rollout.max-new-tokens": "max-completion-length max-response-length response-length max-tokens max-length "
    "max-total-sequence-length generate-max-len max-model-len",
    "--rollout.stop-tokens": "stop stop-token-ids eos-token-id",
    "--rollout.stop-strings": "stop stop-sequences stop-words until",
    "--data.prompts": "batch-size train-batch-size global-batch-size train-global-batch-size rollout-batch-size "
    "per-device-train-batch-size num-prompts-per-step",
    "--data.max-prompt-tokens": "max-prompt-length max-input-length prompt-max-len",
    "--data.train": "dataset dataset-name dataset-path data-path train-files train-data train-data-path prompt-data",
    "--data.held-out": "eval-dataset val-files test-files val-data",
    "--data.prompt-field": "prompt-key input-key",
    "--data.answer-field": "answer-key label-key",
    "--reward.scorer": "reward-funcs reward-function reward-fn reward-model custom-reward-function",
    "--advantage.scale": "scale-rewards norm-adv-by-std-in-grpo normalize-rewards",
    "--loss.clip-low": "epsilon clip-ratio clip-ratio-low cliprange clip-range eps-clip ratio-clip-min",
    "--loss.clip-high": "epsilon epsilon-high clip-ratio clip-ratio-high cliprange clip-range eps-clip ratio-clip-max",
    "--loss.dual-clip": "delta clip-ratio-c ratio-clip-c",
    "--loss.aggregate": "loss-type loss-agg-mode",
    "--loss.kl-coefficient": "beta kl-coef kl-coeff kl-loss-coef kl-penalty init-kl-coef reference-policy-kl-penalty "
    "use-kl-loss",
    "--loss.ratio": "importance-sampling-level",
    "--selection.drop-truncated": "mask-truncated-completions overlong-filtering",
    "--policy-optimizer.kind": "optim optimizer",
    "--policy-optimizer.clip-norm": "max-grad-norm grad-clip clip-grad",
    "--policy-optimizer.schedule": "lr-scheduler lr-scheduler-type lr-decay-style",
    "--policy-optimizer.warmup-steps": "warmup-ratio lr-warmup-steps lr-warmup-iters",
    "--policy-optimizer.b1": "beta1 adam-beta1",
    "--policy-optimizer.b2": "beta2 adam-beta2",
    "--updates.epochs": "num-iterations ppo-epochs",
    "--updates.minibatches": "mini-batch-size ppo-mini-batch-size",
    "--checkpoint.every": "save-steps save-freq save-interval save-period",
    "--checkpoint.keep": "save-total-limit keep-top-k max-actor-ckpt-to-keep",
    "--eval.every": "eval-steps eval-interval test-freq val-period",
    "--log.wandb-project": "wandb project-name report-to",
    "--mesh.tensor": "tp tp-size tensor-parallel-size tensor-model-parallel-size",
    "--mesh.fsdp": "fsdp-size zero-stage",
    "--mesh.expert": "ep ep-size expert-parallel-size expert-model-parallel-size",
    "--hosts.count": "nnodes num-nodes",
    "--asynchronous.lag": "async staleness max-trajectory-age-steps",
}


def hint(
    name: str, fields: Iterable[Field], elsewhere: Mapping[str, str], spelt: Callable[[str], str] = lambda flag: flag
) -> str:
    """Return the end of a message about the unknown option `name`: which option it may be, "" if none is like it.

    fields:    the options that are allowed.
    elsewhere: where others are allowed, by option.
    spelt:     returns an option as the user writes it.
    """
    fields = list(fields)
    flags = [field.flag for field in fields]
    if name in elsewhere:
        last = f"--{_last(name)}"
        return f"; {elsewhere[name]}" + (f", but {spelt(last)}" if last in flags else "")
    every = [*flags, *(flag for flag in elsewhere if flag not in flags)]
    found = named_like(name, flags) or named_like(name, every) or with_value(name, fields) or spelt_like(name, every)
    allowed = [spelt(flag) for flag in found if flag in flags]
    if allowed:
        *others, last = allowed[:MOST_NAMED]
        more = f" ({len(allowed) - MOST_NAMED} more: --help {name.lstrip('-')})" if len(allowed) > MOST_NAMED else ""
        return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?{more}"
    return "".join(f"; {spelt(flag)}: {elsewhere[flag]}" for flag in found[:MOST_NAMED])


def named_like(name: str, flags: Sequence[str]) -> list[str]:
    """Return the options that `name` may mean: its synonyms and those with its last part, else those with its words.

    name: with or without dashes and sections. Options of a section that `name` mentions come first; otherwise the
    order is that of `flags`, where the policy's options come before the draft's.
    """
    last, sections = _last(name), _words(name) - _words(_last(name))
    meant = [flag for flag, names in SYNONYMS.items() if last in names.split()]
    found = [flag for target in meant for flag in flags if target in (flag, f"--{_last(flag)}")]
    found += [flag for flag in flags if _last(flag) == last]
    if not found and last:
        found = [flag for flag in flags if _words(last) <= _words(flag)]
    return sorted(dict.fromkeys(found), key=lambda flag: -len(_words(flag) & sections))


def spelt_like(name: str, flags: Sequence[str]) -> list[str]:
    """Return the options whose name, last part or synonym is spelt most like `name`; none if all differ much."""
    spelt = {word: [word] for names in SYNONYMS.values() for word in names.split()}
    spelt |= {flag.lstrip("-"): [flag] for flag in flags} | {_last(flag): [_last(flag)] for flag in flags}
    # A part of a name in common, as in "tool" and "top-p", says nothing.
    closest = difflib.get_close_matches(name.lstrip("-").lower(), spelt, n=1, cutoff=0.8)
    return [found for close in closest for each in spelt[close] for found in named_like(each, flags)]


def with_value(name: str, fields: Iterable[Field]) -> list[str]:
    """Return the options with all words of `name`, without its sections, in their name or the words that they take."""
    words, taken = _words(_last(name)), re.compile(r"\b[a-z][\w-]*")  # without types: INT, None
    return [
        field.flag
        for field in fields
        if words and words <= _words(" ".join([field.flag, *taken.findall(field.metavar)]))
    ]


def matching(text: str, fields: Iterable[Field]) -> list[Field]:
    """Return the fields that `text` may name, then those with all its words in their name, values or description."""
    fields = list(fields)
    named = named_like(text, [field.flag for field in fields])
    words = re.split(r"[\s_-]+", text.strip("-").lower())
    found = [field for field in fields if all(word in _text(field) for word in words)]
    return [field for field in fields if field.flag in named] + [field for field in found if field.flag not in named]


def _text(field: Field) -> str:
    return f"{field.flag} {field.metavar} {field.help}".lower()


def _last(name: str) -> str:
    return re.sub(r"[\s_]", "-", name.lstrip("-")).rpartition(".")[2].lower()


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z\d]+", re.sub(r"\blr\b", "learning-rate", name.lower())))
