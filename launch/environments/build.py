"""The environment that a run's configuration names, for problems of any set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.schema import RunConfig
from configs.schema.environments import LOCAL
from launch.cli.functions import load_function, refusing_errors
from launch.data.problems import Problem
from launch.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from launch.environments.calls import FORMATS, format_of
from launch.environments.episodes import Episodes
from launch.environments.joint import Joint
from launch.environments.processes import ProcessEpisodes
from launch.environments.schema import tool_schemas
from launch.environments.text_environment import Reports, TextEnvironment, turn_reader
from launch.environments.threads import ThreadEpisodes
from launch.environments.tools import Tools
from launch.errors import ConfigError
from specjax.environments import Environment, HostEnvironment
from specjax.parallel import processes

EnvironmentOf = Callable[[Sequence[Problem]], Environment | HostEnvironment]


@dataclass(frozen=True)
class Local:
    """An environment of this process, which runs in its threads: a class or function that makes one, or tools."""

    make: Callable[[], Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()


def environment_of(config: RunConfig, tokenizer: Tokenizer, local: Local | None = None) -> EnvironmentOf | None:
    """Return the function from problems to the environment of their completions; None without one.

    Tools are shown in all prompts of the tokenizer from now on. local: in place of functions that the config names.

    Raises ConfigError if a function cannot be imported or is no environment, and if the chat template cannot continue
    a conversation.
    """
    options = config.environment
    if not options.names:
        return None
    option, names = "tools" if options.tools else "function", options.names
    owner = f"environment.{option} = {', '.join(names)}"
    if local is None and (gone := [name for name in names if name.startswith(LOCAL)]):
        raise ConfigError(
            f"environment.{option} = {gone[0]}: was a function of a script; give --environment.{option} "
            "package.module:name, or in Python train(.., resume=True)"
        )
    if options.tools:
        _check_host(config, owner)
        functions = [load_function("environment.tools", name) for name in names] if local is None else local.tools
        episodes, read, joint = _with_tools(config, tokenizer, functions, local is not None)
    else:
        make = load_function("environment.function", names[0]) if local is None else local.make
        assert make is not None
        with refusing_errors("environment.function", names[0], "be a class or function that makes an environment"):
            made: Any = make()
        if isinstance(made, Environment):
            return lambda problems: made
        _check_host(config, owner)
        if isinstance(made, HostEnvironment):
            return lambda problems: made
        episodes, read, joint = _of_text(config, tokenizer, made, make, local is not None)
    reports = Reports(owner)
    return lambda problems: TextEnvironment(options.answer_tokens, problems, episodes, read, joint, reports)


def _check_host(config: RunConfig, owner: str) -> None:
    """Raise ConfigError where an environment on the host cannot answer."""
    if config.rollout.phases:
        raise ConfigError(f"rollout.phases = {config.rollout.phases}: must be empty with {owner}, which is not in JAX")
    if processes.count() > 1:
        raise ConfigError(f"{owner}: answers in one process; must be an environment in JAX in a job of several")


def _with_tools(
    config: RunConfig, tokenizer: Tokenizer, functions: Sequence[Callable[..., Any]], is_local: bool
) -> tuple[Episodes, Callable[[Sequence[int]], str], Joint]:
    options = config.environment
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.template is None:
        raise ConfigError(
            f"environment.tools = {', '.join(options.tools)}: needs a chat template that shows tools; must be empty, "
            "and environment.function set"
        )
    schemas = tool_schemas(functions)
    tokenizer.tools = schemas
    calls = options.calls or format_of(tokenizer.template)
    limits = options.call_limit_s, options.episode_limit_s
    if is_local:
        episodes = ThreadEpisodes(partial(Tools, functions, calls), *limits)
    else:
        episodes = ProcessEpisodes({"tools": [*options.tools], "calls": calls}, *limits)
    read = turn_reader(tokenizer, tokenizer.stop_tokens, FORMATS[calls].markers)
    return episodes, read, Joint(tokenizer, schemas, limit=options.answer_tokens, roles=("tool",))


def _of_text(
    config: RunConfig, tokenizer: Tokenizer, made: Any, make: Callable[[], Any], is_local: bool
) -> tuple[Episodes, Callable[[Sequence[int]], str], Joint]:
    options = config.environment
    if not callable(getattr(made, "step", None)):
        raise ConfigError(
            f"environment.function = {options.function}: makes {type(made).__name__}, which has no step; must make an "
            "environment"
        )
    limits = options.call_limit_s, options.episode_limit_s
    if is_local:
        episodes = ThreadEpisodes(make, *limits)
    else:
        episodes = ProcessEpisodes({"environment": options.function}, *limits)
    joint = Joint(tokenizer, limit=options.answer_tokens, roles=getattr(made, "roles", ("user",)))
    return episodes, turn_reader(tokenizer, tokenizer.stop_tokens, ()), joint
