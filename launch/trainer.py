"""Training from Python: `train(model=.., data=.., reward=..)`, by the machinery of `python -m launch.train`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from configs.override import override
from configs.schema import RunConfig
from configs.schema.environments import LOCAL
from configs.schema.rewards import ENVIRONMENT, NO_REWARD
from launch.cli.consequences import with_consequences
from launch.cli.effects import without_effect
from launch.cli.fields import fields_of
from launch.cli.microbatches import with_fitting_microbatches
from launch.cli.option_search import hint
from launch.cli.program import use_compile_cache
from launch.cli.recipe_options import RECIPE_ONLY, TRAIN, reads
from launch.cli.recipes import load_recipe
from launch.comparison.closing import check_comparison, compare_steps, without_moments
from launch.comparison.stage_times import VariantReport
from launch.console import console, wide_console
from launch.data.problem_list import ProblemList
from launch.data.prompts import read_prompt
from launch.environments.build import Local
from launch.errors import ConfigError, Stopped, as_config_error
from launch.evaluation.one_prompt import Answers
from launch.evaluation.sampler import drafts_pay
from launch.jobs.hosts import join_hosts
from launch.rewards.code import code_of_function
from launch.rewards.reward_fn import RewardOf, function_reward, make_pool, scoring_of
from launch.rewards.scorers import FUNCTION, scorer_of
from launch.run.directory import RUNS
from launch.run.export import ExportArgs, export
from launch.run.history import EVENTS_FILE, records_of
from launch.run.start import held_out_evaluator
from launch.setup.experiment import Experiment
from launch.train import run
from specjax.keys import seed_step
from specjax.options import MOST, show
from specjax.train.config import check_groups
from specjax.types import TrainState

# Options that a function as reward would ignore.
SCORERS = ("reward.scorer", "reward.also", "reward.weights")
MOST_SAMPLES = 2**20
# The teacher that is the model itself, without adapters.
BASE = "base"


@dataclass(eq=False)
class TrainedRun:
    """A run that has ended: its networks, and its directory with config.json, metrics.jsonl and report.html.

    Attributes:
        directory:  Directory of the run. Programs take it in place of a recipe.
        experiment: Config, problems, tokenizer, functions and trained networks of the run.
        state:      Parameters and moments after the last step; without moments once steps were compared.
        reward_of:  Returns the reward of problems; None: the config's scorer.
        accuracy:   Held-out accuracy after the last step, 0 .. 1; None if the run did not measure it.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    reward_of: RewardOf | None
    accuracy: float | None = None

    def __post_init__(self) -> None:
        self._calls = 0

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", held-out accuracy {self.accuracy:.1%}"
        return f"TrainedRun({self.directory}, {self.experiment.config.steps} steps{accuracy})"

    def generate(
        self, prompt: str | Sequence[Mapping[str, Any]], samples: int = 1, seed: int | None = None
    ) -> list[str]:
        """Return sampled answers to a prompt, drafted by the trained draft.

        Args:
            prompt:  Text, or a list of chat messages.
            samples: Number of answers.
            seed:    The same seed gives the same answers. None: other answers at every call.

        Raises ConfigError for another prompt, and for one that is too long.
        """
        _check_number("samples", samples, 1, MOST_SAMPLES)
        _check_number("seed", self._calls if seed is None else seed, 0, MOST)
        given = prompt
        if isinstance(prompt, list | tuple):
            given = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
        asked = read_prompt({"prompt": given}, "prompt", "generate")
        # Training steps are not negative, and evaluation uses -1.
        noise = seed_step(self.experiment.config.seed, -3 - self._calls) if seed is None else seed_step(int(seed), -2)
        self._calls += 1
        return self._answers(asked, int(samples), noise)

    @cached_property
    def _answers(self) -> Answers:
        drafts = drafts_pay(self.experiment, self.state.drafting)
        return Answers(self.experiment if drafts else self.experiment.without_draft())

    def evaluate(self) -> float:
        """Return the accuracy on the held-out problems: the share whose reward is above 0.5.

        Raises ConfigError for a run without a reward.
        """
        if self.experiment.config.reward.scorer == NO_REWARD:
            raise ConfigError("reward.scorer = none: no answer is correct; must be a scorer to evaluate with")
        with _scoring(self.experiment, self.reward_of) as reward_of:
            reward_fn = reward_of(self.experiment.problems.held_out, self.experiment.tokenizer)
            return held_out_evaluator(self.experiment, reward_fn)(self.state).accuracy

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

        Drops the optimiser's moments from `state`: their memory is needed. Raises ConfigError if the run cannot be
        compared, as one without a draft.
        """
        _check_number("steps", steps, 1, MOST)
        experiment = replace(self.experiment, config=override(self.experiment.config, {"speedup.steps": int(steps)}))
        check_comparison(experiment)
        self.state = without_moments(self.state)
        with _scoring(experiment, self.reward_of) as reward_of:
            reward_fn = reward_of(experiment.problems.train, experiment.tokenizer)
            return compare_steps(experiment, reward_fn, self.state, wide_console)


def train(
    model: str | Path,
    data: str | Path | Sequence[Mapping[str, Any]],
    reward: Callable[..., Any] | str | None = None,
    steps: int = 200,
    *,
    tools: Sequence[Callable[..., Any] | str] = (),
    environment: Callable[[], Any] | str | None = None,
    teacher: str | Path | None = None,
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
                 "package.module:function", which runs in processes of its own with `reward.time_limit_s`. None: only
                 what the environment gives, or with a teacher no reward: problems then need no answer.
        steps:   Number of steps.
        tools:   Functions that the model may call, with type hints and docstrings in Google's style. They run in
                 threads of this process, where a call that hangs is never stopped; given as "package.module:name", in
                 processes.
        environment: Class or function that makes an environment of a completion (docs/turns.md), or its name.
        teacher: Model to learn from, as `model`, beside the reward (docs/teacher.md); or "base", the model without the
                 adapters that are trained.
        out:     Directory of the run. None: a new one in runs.
        resume:  Continue the run in `out`.
        options: Other options by their names on the command line, as {"rollout.group_size": 16}. Lists become tuples.

    Raises ConfigError for bad input, and Stopped after a signal, once the run is saved.
    """
    use_compile_cache()
    answering, local = _environment_options(tools, environment)
    given = _option_values(options or {})
    taught = teacher is not None or any(name in given for name in ("teacher.kind", "teacher.path"))
    if reward is None and environment is None and not taught:
        raise ConfigError("reward = None: must be a function or the name of a scorer without environment and teacher")
    scorer = reward or (NO_REWARD if environment is None else ENVIRONMENT)
    reward_of, named = None, {} if teacher is None else {"teacher.path": str(teacher)}
    if teacher == BASE:
        named = {"teacher.kind": BASE}
    if callable(reward):
        name = _name_of(reward)
        scorer_of(reward, owner=f"reward = {name}")
        scorer = f"{FUNCTION}{name}"
    codes = [code_of_function(each) for each in (reward, *tools, environment) if callable(each)]
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
        "reward.code": "+".join(filter(None, codes)) or None,
        **answering,
        **named,
        "steps": _as_tuple(steps),
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
        reward_of = partial(function_reward, reward, thinking=config.reward.thinking, turns=bool(answering))
    for line in without_effect(recipe, config, given, TRAIN):
        console.print(line)
    with problems.written() if problems is not None else nullcontext():
        result = run(join_hosts(config), reward_of, local)
    if result.signal is not None:
        raise Stopped(result.signal, f"stopped; train(.., out={str(result.directory)!r}, resume=True) continues it")
    results = [record.get("result") for record in records_of(result.directory / EVENTS_FILE)]
    accuracy = next((each["accuracy_after"] for each in reversed(results) if each and "accuracy_after" in each), None)
    return TrainedRun(result.directory, result.experiment, result.state, reward_of, accuracy)


def _environment_options(
    tools: Sequence[Callable[..., Any] | str], environment: Callable[[], Any] | str | None
) -> tuple[dict[str, Any], Local | None]:
    """Return the options that name an environment, and what of it is of this process."""
    if tools and environment is not None:
        raise ConfigError(f"tools = {show(tools)}: must be empty with an environment")
    if isinstance(tools, str) or callable(tools):
        raise ConfigError(f"tools = {show(tools)}: must be a list of functions, or of names")
    if not (environment is None or isinstance(environment, str) or callable(environment)):
        raise ConfigError(f"environment = {show(environment)}: must be a class or function that makes one, or its name")
    functions = [*tools] if environment is None else [environment]
    if len({isinstance(each, str) for each in functions}) > 1:
        raise ConfigError(f"tools = {show(tools)}: must all be functions, or all be names")
    names = tuple(each if isinstance(each, str) else f"{LOCAL}{_name_of(each)}" for each in functions)
    if not functions:
        return {}, None
    options = {"environment.tools": names} if environment is None else {"environment.function": names[0]}
    own = [each for each in functions if not isinstance(each, str)]
    if not own:
        return options, None
    return options, Local(tools=own) if environment is None else Local(make=own[0])


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise ConfigError(f"{name} = {show(value)}: must be an integer from {least} to {most}")


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
    """Return lists as tuples, and numbers and arrays of numpy as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


@contextmanager
def _scoring(experiment: Experiment, reward_of: RewardOf | None) -> Iterator[RewardOf]:
    """Yield the function from problems to their reward; scorer processes live as long as the block."""
    if reward_of is not None:
        yield reward_of
        return
    with make_pool(experiment.config) or nullcontext() as pool:
        yield scoring_of(experiment.config.reward, pool)
