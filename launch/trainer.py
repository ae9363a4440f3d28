"""Training from Python: `train(model=.., data=.., reward=..)`, by the machinery of `python -m launch.train`."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.override import override
from configs.schema import RunConfig
from launch.cli.console import wide_console
from launch.cli.errors import ConfigError, Stopped, as_config_error
from launch.cli.fields import fields_of
from launch.cli.hosts import join_hosts
from launch.cli.long_phases import LongPhases
from launch.cli.microbatches import with_fitting_microbatches
from launch.cli.options import use_compile_cache, with_consequences
from launch.cli.recipe_options import RECIPE_ONLY, reads
from launch.cli.recipes import load_recipe
from launch.comparison.closing import check_comparison, compare_steps
from launch.comparison.stage_times import VariantReport
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.evaluation.one_prompt import answer_prompt
from launch.rewards.reward_fn import function_reward, make_pool, make_reward
from launch.rewards.scorers import FUNCTION
from launch.run.directory import RUNS
from launch.run.export import ExportArgs, export
from launch.run.start import held_out_evaluator
from launch.setup.experiment import Experiment
from launch.train import run
from models.files import write_atomically
from specjax.rewards import RewardFn
from specjax.train.config import check_groups
from specjax.types import TrainState

RewardOf = Callable[[Sequence[Problem], Tokenizer], RewardFn]
# Options that a function as reward would ignore.
SCORERS = ("reward.scorer", "reward.also", "reward.weights")


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended: its networks, and its directory with config.json, metrics.jsonl and report.html.

    Attributes:
        directory:  Directory of the run. `launch.generate`, `launch.evaluate` and others take it as --checkpoint.
        experiment: Config, problems, tokenizer and functions of the run.
        state:      Parameters and moments after the last step.
        reward_of:  Returns the reward of problems; None: the config's scorer.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    reward_of: RewardOf | None

    def generate(self, prompt: str, samples: int = 1) -> list[str]:
        """Return sampled answers to a prompt, drafted by the trained draft."""
        pieces = list[str]()
        answer_prompt(self.experiment, self.state.params, prompt, samples, pieces.append)
        answers = ["".join(pieces)] if samples == 1 else pieces
        return [answer.removesuffix("\n\n") for answer in answers]

    def evaluate(self) -> float:
        """Return the accuracy on the held-out problems: the share whose reward is above 0.5."""
        with _scoring(self.experiment, self.reward_of) as reward_of:
            reward_fn = reward_of(self.experiment.problems.held_out, self.experiment.tokenizer)
            return held_out_evaluator(self.experiment, reward_fn)(self.state.params)

    def save(self, policy: str | Path, draft: str | Path | None = None) -> None:
        """Write the policy in Hugging Face's layout to a new directory, and the draft to another.

        Raises ConfigError if a directory is in use, or if the run saved no checkpoint.
        """
        run = str(self.directory)
        export(Path(policy), self.experiment, ExportArgs(checkpoint=run))
        if draft is not None:
            export(Path(draft), self.experiment, ExportArgs(checkpoint=run, part="draft"))

    def compare(self, steps: int = 5) -> VariantReport:
        """Time steps with and without the draft in turns, print the table of whole steps and return the draft's row.

        Frees the optimiser's moments. Raises ConfigError if the run cannot be compared, as one without a draft.
        """
        experiment = replace(self.experiment, config=override(self.experiment.config, {"speedup.steps": steps}))
        check_comparison(experiment)
        with _scoring(experiment, self.reward_of) as reward_of:
            reward_fn = reward_of(experiment.problems.train, experiment.tokenizer)
            return compare_steps(experiment, reward_fn, self.state, wide_console, LongPhases())


def train(
    model: str | Path,
    data: str | Path | Sequence[Mapping[str, Any]],
    reward: Callable[..., Any] | str,
    steps: int = 200,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Train a model and its draft by RL, as `python -m launch.train own_data` does, and return the run.

    Args:
        model:   Directory in Hugging Face layout, or name on the hub.
        data:    File of problems or name on the hub, or a list of problems: dicts with `prompt` (text or messages),
                 `answer` and whatever the reward reads. `options` names other fields. A list is kept in a file in runs.
        reward:  Function (completion, problem) -> number, above 0.5 if it is correct. It runs in this process, without
                 a time limit: a call that hangs blocks the run. `problem` is {"prompt", "answer", "columns"}; under
                 another name, the parameter is the answer. Or the name of a scorer, as "math" or
                 "package.module:function", which runs in processes of its own with `reward.time_limit_s`.
        steps:   Number of steps.
        out:     Directory of the run. None: a new one in runs.
        resume:  Continue the run in `out`.
        options: Other options by their names on the command line, as {"rollout.group_size": 16}. Lists become tuples.

    Raises ConfigError for bad input, and Stopped after a signal, once the run is saved.
    """
    use_compile_cache()
    reward_of, scorer = None, reward
    if callable(reward):
        reward_of = partial(function_reward, reward)
        scorer = f"{FUNCTION}{getattr(reward, '__name__', type(reward).__name__)}"
    given = _option_values(options or {})
    if ignored := [name for name in given if callable(reward) and name in SCORERS]:
        raise ConfigError(f"options: {', '.join(ignored)}: must not be set with a function as reward; it is the reward")
    values: dict[str, Any] = {
        "model.path": str(model),
        "data.train": str(data) if isinstance(data, str | Path) else str(_kept(data)),
        "reward.scorer": scorer,
        "steps": steps,
        "out": None if out is None else str(out),
        "resume": resume,
    }
    with as_config_error():
        recipe = load_recipe("own_data")
        config = override(recipe, with_consequences(recipe, values | given))
        if "microbatches" not in given:
            config = with_fitting_microbatches(config)
        check_groups(config)
    result = run(join_hosts(config), reward_of)
    if result.signal is not None:
        raise Stopped(result.signal, f"stopped; train(.., out={str(result.directory)!r}, resume=True) continues it")
    return TrainedRun(result.directory, result.experiment, result.state, reward_of)


def _option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by the paths of their fields. Raises ConfigError if there is no such option."""
    known = {field.path for field in fields_of(RunConfig) if not reads(RECIPE_ONLY, field.path)}
    values = {name.replace("-", "_"): _as_tuple(value) for name, value in options.items()}
    if unknown := values.keys() - known:
        raise ConfigError(
            f"options: {', '.join(sorted(unknown))}: unknown; must be options that `python -m launch.train own_data "
            "--help all` lists, as rollout.group_size"
        )
    return values


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _kept(problems: Sequence[Mapping[str, Any]]) -> Path:
    """Write problems to a file that is named by its content, so that a run can be resumed. Return its path."""
    try:
        lines = "".join(json.dumps(dict(problem), ensure_ascii=False) + "\n" for problem in problems)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data: must be dicts of text, numbers and lists: {error}") from None
    path = RUNS / f"data-{hashlib.sha256(lines.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines)
    return path


@contextmanager
def _scoring(experiment: Experiment, reward_of: RewardOf | None) -> Iterator[RewardOf]:
    """Yield the function from problems to their reward; scorer processes live as long as the block."""
    if reward_of is not None:
        yield reward_of
        return
    with make_pool(experiment.config.reward) or nullcontext() as pool:
        yield partial(make_reward, pool)
