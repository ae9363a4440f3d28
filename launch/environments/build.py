"""The environment that a run's configuration names, for problems of any set."""

import inspect
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
from launch.environments.joint import Joint
from launch.environments.limited import LimitedEpisodes
from launch.environments.processes import ProcessEpisodes
from launch.environments.schema import tool_schemas
from launch.environments.threads import ThreadEpisodes
from launch.environments.token_environment import Reports, TokenEnvironment, turn_reader
from launch.environments.tools import Tools
from launch.errors import ConfigError
from specjax.environments import Environment, Episode, HostEnvironment
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
    if local is None:
        _check_named(config)
    owner, names = _owner(config), options.names
    if options.tools:
        _check_host(config, owner)
        functions = [load_function("environment.tools", name) for name in names] if local is None else local.tools
        deterministic = all(map(is_deterministic, functions))
        episodes, read, joint = _with_tools(config, tokenizer, functions, local is not None)
    else:
        make = load_function("environment.function", names[0]) if local is None else local.make
        assert make is not None
        made = _made(config, make)
        if not _takes_text(made):
            return _in_tokens(config, owner, made)
        _check_host(config, owner)
        deterministic = is_deterministic(made)
        episodes, read, joint = _of_text(config, tokenizer, made, make, local is not None)
    reports = Reports(owner)
    return lambda problems: TokenEnvironment(
        options.answer_tokens, problems, episodes, read, joint, reports, deterministic
    )


def is_deterministic(environment: Any) -> bool:
    """Return whether the answers of an environment, or of a tool, follow from problem, seed and turns, as it says."""
    return bool(getattr(environment, "deterministic", True))


@dataclass(frozen=True)
class Unanswered:
    """An environment on the host as a plan reads it: only its width. width: most tokens of an observation."""

    width: int

    def begin(self, problem: int, seed: int) -> Episode:
        raise AssertionError("a plan does not run programs")


def planned_environment_of(config: RunConfig) -> EnvironmentOf | None:
    """Return `environment_of` as a plan reads it: in JAX, or of the same width on the host. None without one.

    Reads no tokenizer and starts no process. Raises ConfigError if the function cannot be imported or is no
    environment.
    """
    options = config.environment
    if not options.names:
        return None
    _check_named(config)
    if options.function is not None:
        made = _made(config, load_function("environment.function", options.function))
        if not _takes_text(made):
            return _in_tokens(config, _owner(config), made)
    _check_host(config, _owner(config))
    return lambda problems: Unanswered(options.answer_tokens)


def showing_tools(config: RunConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer, whose prompts show the tools that the config names from now on. Raises ConfigError."""
    if names := config.environment.tools:
        _show_tools(config, tokenizer, [load_function("environment.tools", name) for name in names])
    return tokenizer


def _show_tools(
    config: RunConfig, tokenizer: Tokenizer, functions: Sequence[Callable[..., Any]]
) -> tuple[HuggingFaceTokenizer, str]:
    """Show tools in all prompts of the tokenizer. Return it, and the chat template that shows them."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.template is None:
        raise ConfigError(
            f"environment.tools = {', '.join(config.environment.tools)}: needs a chat template that shows tools; must "
            "be empty, and environment.function set"
        )
    tokenizer.tools = tool_schemas(functions)
    return tokenizer, tokenizer.template


def _owner(config: RunConfig) -> str:
    """Return what messages name."""
    return f"environment.{'tools' if config.environment.tools else 'function'} = {', '.join(config.environment.names)}"


def _check_named(config: RunConfig) -> None:
    """Raise ConfigError for functions that only a script had."""
    option = "tools" if config.environment.tools else "function"
    if gone := [name for name in config.environment.names if name.startswith(LOCAL)]:
        raise ConfigError(
            f"environment.{option} = {gone[0]}: was a function of a script; give --environment.{option} "
            "package.module:name, or in Python train(.., resume=True)"
        )


def _made(config: RunConfig, make: Callable[[], Any]) -> Any:
    name = config.environment.names[0]
    with refusing_errors("environment.function", name, "be a class or function that makes an environment"):
        return make()


def _takes_text(made: Any) -> bool:
    """Return whether an environment is one in text: its step takes the turn only."""
    try:
        inspect.signature(made.step).bind("turn")
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _in_tokens(config: RunConfig, owner: str, made: Any) -> EnvironmentOf:
    """Return an environment in tokens for all problems. Raises ConfigError for what is no environment."""
    if not isinstance(made, HostEnvironment):
        raise ConfigError(f"{owner}: makes {type(made).__name__}, which has no step(turn); must make an environment")
    if not isinstance(made, Environment):
        _check_host(config, owner)
    return lambda problems: made


def _check_host(config: RunConfig, owner: str) -> None:
    """Raise ConfigError where an environment on the host cannot answer."""
    lag = config.asynchronous.lag
    if lag is not None:
        raise ConfigError(f"asynchronous.lag = {lag}: must be None with {owner}, which is not in JAX")
    if config.rollout.phases:
        raise ConfigError(f"rollout.phases = {config.rollout.phases}: must be empty with {owner}, which is not in JAX")
    if processes.count() > 1:
        raise ConfigError(f"{owner}: answers in one process; must be an environment in JAX in a job of several")


def _with_tools(
    config: RunConfig, tokenizer: Tokenizer, functions: Sequence[Callable[..., Any]], is_local: bool
) -> tuple[LimitedEpisodes, Callable[[Sequence[int]], str], Joint]:
    options = config.environment
    shown, template = _show_tools(config, tokenizer, functions)
    calls = options.calls or format_of(template)
    joint = Joint(tokenizer, shown.tools, limit=options.answer_tokens, roles=("tool",))
    limits = options.call_limit_s, options.episode_limit_s
    if is_local:
        episodes = ThreadEpisodes(partial(Tools, functions, calls), *limits)
    else:
        episodes = ProcessEpisodes({"tools": [*options.tools], "calls": calls}, *limits)
    read = turn_reader(shown, shown.stop_tokens, FORMATS[calls].markers)
    return episodes, read, joint


def _of_text(
    config: RunConfig, tokenizer: Tokenizer, made: Any, make: Callable[[], Any], is_local: bool
) -> tuple[LimitedEpisodes, Callable[[Sequence[int]], str], Joint]:
    options = config.environment
    joint = Joint(tokenizer, limit=options.answer_tokens, roles=getattr(made, "roles", ("user",)))
    limits = options.call_limit_s, options.episode_limit_s
    if is_local:
        episodes = ThreadEpisodes(make, *limits)
    else:
        episodes = ProcessEpisodes({"environment": options.function}, *limits)
    return episodes, turn_reader(tokenizer, tokenizer.stop_tokens, ()), joint
