"""Named algorithms of GRPO's family. Each sets every field in which they differ.

Apply one with `--algorithm NAME`, before the other options, or in a recipe with `with_algorithm`. With these settings
benchmarks/algorithms.py learns both of its tasks.

- Settings come from the papers, with one exception: KL is off unless it defines the algorithm, as in DAPO (section 2.3)
  and Dr. GRPO. `Algorithm.note` says how to turn on a paper's KL.
- Not set here: learning rates, updates per rollout, and importance weights, which correct for the rollout's log-probs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from configs.override import override
from configs.schema import RunConfig

# GRPO, arXiv 2402.03300: section 4.1.2 (advantages of outcome rewards), equation 3 (clip, mean over each sequence).
_GRPO: dict[str, Any] = {
    "advantage.baseline": "group",
    "advantage.scale": "group",
    "loss.ratio": "token",
    "loss.surrogate": "clipped",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.dual_clip": None,
    "loss.aggregate": "sequence",
    "loss.kl_estimator": "k3",
    "loss.kl_coefficient": 0.0,
    "loss.kl_in": "loss",
    "selection.groups": 0,
    "selection.drop_truncated": False,
    "selection.overlong_buffer": 0,
    "selection.overlong_penalty": 1.0,
}


@dataclass(frozen=True)
class Algorithm:
    """The settings of an algorithm that differ from GRPO's.

    Attributes:
        paper:   arXiv id, and the section or equation with the settings.
        changes: Fields that differ from GRPO's, by path.
        note:    Further choices of the paper, with the options that set them.
    """

    paper: str
    changes: dict[str, Any] = field(default_factory=dict)
    note: str = ""


ALGORITHMS = {
    "grpo": Algorithm("2402.03300, equation 3", note="the paper's KL: --loss.kl-coefficient 0.04"),
    "dapo": Algorithm(
        "2503.14476, equations 8 to 13",
        # Section 3.1: clip-higher; 3.3: token-level loss; 3.4: overlong filtering and punishment. `with_algorithm` adds
        # two settings that depend on the run: dynamic sampling (3.2) and the length of the overlong buffer.
        {"loss.clip_high": 0.28, "loss.aggregate": "token", "selection.drop_truncated": True},
        note="generates twice the prompts that it trains on; --data.prompts sets how many it generates",
    ),
    "dr_grpo": Algorithm("2503.20783, section 3.2", {"advantage.scale": "none", "loss.aggregate": "budget"}),
    "rloo": Algorithm(
        "2402.14740, equation 8",
        {"advantage.baseline": "others", "advantage.scale": "none"},
        note="KL in the reward, as in the paper: --loss.kl-in reward --loss.kl-estimator k1 --loss.kl-coefficient C",
    ),
    "reinforce_pp": Algorithm(
        "2501.03262, equation 8",
        {
            "advantage.baseline": "batch",
            "advantage.scale": "batch",
            "loss.kl_in": "token",
            "loss.kl_estimator": "k1",
            "loss.kl_coefficient": 0.01,
        },
    ),
    # Clips: section 5.1.
    "gspo": Algorithm(
        "2507.18071, equation 7", {"loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}
    ),
    # Section 3.1: no lower clip. The paper does not state its upper clip; this is DAPO's.
    "cispo": Algorithm(
        "2506.13585, equation 4",
        {"loss.surrogate": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 0.28, "loss.aggregate": "token"},
    ),
}


def with_algorithm(config: RunConfig, name: str, given: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """Return the run with the settings of a named algorithm. Values in `given`, by path, override them.

    A step trains on as many prompts as before. DAPO generates twice as many, or `data.prompts` if that is given, and
    trains on half of them. It penalises lengths in the last fifth of the budget: 4,096 of 20,480 tokens in the paper.
    """
    trained = config.selection.groups or config.data.prompts
    settings = _GRPO | ALGORITHMS[name].changes | {"data.prompts": trained}
    if name == "dapo":
        generated = given.get("data.prompts", 2 * trained)
        budget = given.get("rollout.max_new_tokens", config.rollout.max_new_tokens)
        settings |= {"data.prompts": generated, "selection.groups": generated // 2}
        settings["selection.overlong_buffer"] = max(budget // 5, 1)
    return override(config, {**settings, **given})


def describe(name: str, config: RunConfig, given: Mapping[str, Any]) -> str:
    """Return the algorithm's settings in `config` as text, a line per section. Fields in `given` are marked."""
    algorithm, sections = ALGORITHMS[name], {}
    for path in [*_GRPO, "data.prompts"] if name == "dapo" else _GRPO:
        section, field_name = path.split(".")
        value = getattr(getattr(config, section), field_name)
        sections.setdefault(section, []).append(f"{field_name} = {value}" + (" (given)" if path in given else ""))
    lines = [f"algorithm {name} (arXiv {algorithm.paper})" + (f"; {algorithm.note}" if algorithm.note else "")]
    return "\n".join(lines + [f"  {section}: {', '.join(values)}" for section, values in sections.items()])
