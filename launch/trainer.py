"""Training from Python: `train(model=.., data=.., reward=..)`, by the machinery of `python -m launch.train`."""

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
from launch.cli.option_search import hint
from launch.cli.options import use_compile_cache, with_consequences
from launch.cli.recipe_options import RECIPE_ONLY, reads
from launch.cli.recipes import load_recipe
from launch.comparison.closing import check_comparison, compare_steps
from launch.comparison.stage_times import VariantReport
from launch.data.problem_list import ProblemList
from launch.data.problems import Problem
from launch.data.prompts import read_prompt
from launch.data.tokenizers import Tokenizer
from launch.evaluation.one_prompt import answer_prompt
from launch.evaluation.sampler import drafts_pay
from launch.rewards.code import code_of_function
from launch.rewards.reader import answer_rule
from launch.rewards.reward_fn import function_reward, make_pool, make_reward
from launch.rewards.scorers import FUNCTION, scorer_of
from launch.run.directory import RUNS
from launch.run.export import ExportArgs, export
from launch.run.start import held_out_evaluator
from launch.setup.experiment import Experiment
from launch.train import run
from specjax.options import show
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
        directory:  Directory of the run. Programs take it in place of a recipe.
        experiment: Config, problems, tokenizer and functions of the run.
        state:      Parameters and moments after the last step.
        reward_of:  Returns the reward of problems; None: the config's scorer.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    reward_of: RewardOf | None

    def generate(self, prompt: str | Sequence[Mapping[str, Any]], samples: int = 1) -> list[str]:
        """Return sampled answers to a prompt, drafted by the trained draft. prompt: text, or a list of chat messages.

        Raises ConfigError for another prompt, and for one that is too long.
        """
        given = prompt
        if not isinstance(prompt, str):
            given = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
        pieces, asked = list[str](), read_prompt({"prompt": given}, "prompt", "generate")
        drafts = drafts_pay(self.experiment, self.state.drafting)
        experiment = self.experiment if drafts else self.experiment.without_draft()
        answer_prompt(experiment, self.state.params, asked, samples, pieces.append)
        answers = ["".join(pieces)] if samples == 1 else pieces
        return [answer.removesuffix("\n\n") for answer in answers]

    def evaluate(self) -> float:
        """Return the accuracy on the held-out problems: the share whose reward is above 0.5."""
        with _scoring(self.experiment, self.reward_of) as reward_of:
            reward_fn = reward_of(self.experiment.problems.held_out, self.experiment.tokenizer)
            return held_out_evaluator(self.experiment, reward_fn)(self.state)

    def save(self, policy: str | Path, draft: str | Path | None = None) -> None:
        """Write the policy in Hugging Face's layout to a new directory, and the draft to another.

        Raises ConfigError if a directory is in use, or if the run saved no checkpoint.
        """
        # The steps took the networks that the run began with.
        networks = replace(self.experiment.networks, params=self.state.params)
        run, experiment = str(self.directory), replace(self.experiment, networks=networks)
        export(Path(policy), experiment, ExportArgs(checkpoint=run))
        if draft is not None:
            export(Path(draft), experiment, ExportArgs(checkpoint=run, part="draft"))

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
                 `answer` and whatever the reward reads. `options` names other fields. A list is kept in a file in `out`
                 or runs.
        reward:  Function (completion, problem) -> number, above 0.5 if it is correct, or None for no reward. It runs in
                 this process, without a time limit: a call that hangs blocks the run. `completion` is the text after
                 the thinking, `whole_text` all of it, `problem` is {"prompt", "answer", "columns"}, `answer` only its
                 answer: parameters get what their names say (docs/rewards.md). Or the name of a scorer, as "math" or
                 "package.module:function", which runs in processes of its own with `reward.time_limit_s`.
        steps:   Number of steps.
        out:     Directory of the run. None: a new one in runs.
        resume:  Continue the run in `out`.
        options: Other options by their names on the command line, as {"rollout.group_size": 16}. Lists become tuples.

    Raises ConfigError for bad input, and Stopped after a signal, once the run is saved.
    """
    use_compile_cache()
    reward_of, scorer, code = None, reward, None
    if callable(reward):
        name = getattr(reward, "__name__", type(reward).__name__)
        scorer_of(reward, owner=f"reward = {name}")
        scorer, code = f"{FUNCTION}{name}", code_of_function(reward)
    given = _option_values(options or {})
    if ignored := [name for name in given if callable(reward) and name in SCORERS]:
        raise ConfigError(f"options: {', '.join(ignored)}: must not be set with a function as reward; it is the reward")
    problems = None
    if not isinstance(data, str | Path):
        # A run that chose its directory is resumed by naming it.
        directories = [RUNS] if not out else [Path(out), RUNS] if resume else [Path(out)]
        problems = ProblemList.of(data, *directories)
    values: dict[str, Any] = {
        "model.path": str(model),
        "data.train": str(data if problems is None else problems.path),
        "reward.scorer": scorer,
        "reward.code": code,
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
    if callable(reward):
        reward_of = partial(function_reward, reward, rule=answer_rule(config))
    with problems.written() if problems is not None else nullcontext():
        result = run(join_hosts(config), reward_of)
    if result.signal is not None:
        raise Stopped(result.signal, f"stopped; train(.., out={str(result.directory)!r}, resume=True) continues it")
    return TrainedRun(result.directory, result.experiment, result.state, reward_of)


def _option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by the paths of their fields. Raises ConfigError for each that there is not."""
    fields = list(fields_of(RunConfig))
    known = {field.path: field for field in fields if not reads(RECIPE_ONLY, field.path)}
    elsewhere = {field.flag: "can be set only in a recipe file" for field in fields if field.path not in known}
    elsewhere["--algorithm"] = "is only on the command line; set the sections advantage, loss and selection"
    values = {str(name).replace("-", "_"): _as_tuple(value) for name, value in options.items()}
    refused = list[str]()
    for name in values.keys() - known.keys():
        meant = hint(f"--{name.replace('_', '-')}", known.values(), elsewhere, _path_of)
        allowed = "; must be one that `python -m launch.train own_data --help all` lists, as rollout.group_size"
        refused.append(f"options: {name} = {show(values[name])}: unknown option{meant or allowed}")
    if refused:
        raise ConfigError(*sorted(refused))
    return values


def _path_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


@contextmanager
def _scoring(experiment: Experiment, reward_of: RewardOf | None) -> Iterator[RewardOf]:
    """Yield the function from problems to their reward; scorer processes live as long as the block."""
    if reward_of is not None:
        yield reward_of
        return
    with make_pool(experiment.config) or nullcontext() as pool:
        yield partial(make_reward, pool)
