"""Parser of command lines into typed configurations. Bad input becomes one line and exit code 2."""

import argparse
import os
import platform
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_type_hints

import jax

from configs.algorithms import ALGORITHMS, describe, with_algorithm
from configs.override import override
from configs.schema import DraftConfig, RunConfig
from configs.schema.networks import DRAFT_KINDS, HEADS
from configs.schema.rewards import TRACED
from launch.cli.effects import without_effect
from launch.cli.errors import (
    ConfigError,
    RunStopped,
    Stopped,
    as_config_error,
    first_line,
    one_line,
    plain_warnings,
    silence_writers,
)
from launch.cli.failures import fail
from launch.cli.fields import Field, fields_of, summary
from launch.cli.microbatches import with_fitting_microbatches
from launch.cli.option_search import matching
from launch.cli.parser import Parser
from launch.cli.recipe_options import RECIPE_ONLY, TRAIN, reads
from launch.cli.recipes import choices, is_run, load_recipe
from launch.cli.signals import owning_process
from specjax.parallel import processes
from specjax.train.config import check_groups

T = TypeVar("T")

# Exit code of a process that ends because another one of its job died. JAX uses the same code, the one of an abort.
LOST_PEER = 134
# Time to wait until JAX names the lost process. If this process ended at once, it would count as dead too.
NAMED_WITHIN_S = 60
# Start of the line that reports it.
LOST = "error: lost a process of the job:"
_CONTACT_ERRORS = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|socket closed|coordination|heartbeat|barrier", re.IGNORECASE
)

# Fields by which a draft's kind is described. Other kinds refuse them, but all heads take a reduced vocabulary.
_OF_A_KIND = ("path", "vocab_size", "architecture", "mtp_convention", "unroll", "decay")

# Learning rate of adapters, as a multiple of that of all weights (Thinking Machines, "LoRA Without Regret", 2025).
LORA_RATE = 10

_ALGORITHM_OPTION = Field(
    "algorithm",
    (Literal[tuple(ALGORITHMS)], NoneType),  # pyright: ignore[reportInvalidTypeForm]
    default=None,
    help="Sets advantage, loss and selection; other options win.",
)


@owning_process()
def run_program(main: Callable[[list[str]], int]) -> int:
    """Call `main` with the command line's arguments. Return the exit code.

    Some exceptions end the program with a line on stderr: ConfigError, with a line for each refusal, with exit code 2,
    RunStopped and OSError (a full disk) with 1, Stopped and Ctrl-C with 128 + signal, the loss of another process of
    the job with LOST_PEER. Any other exception is a bug: it propagates, or with several processes is printed, with exit
    code 1. A process that fails in one of these ways, other than by a signal, ends the others of its job. If stdout is
    a closed pipe (`--help | head`), the exit code is 128 + SIGPIPE.
    """
    silence_writers()
    plain_warnings()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        processes.gather(None)  # a process that ends before the others counts as dead
        return code
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    except SystemExit:  # raised by --help
        if _drop_unread_output():
            return 128 + signal.SIGPIPE
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        unreachable = isinstance(error, jax.errors.JaxRuntimeError) and "UNAVAILABLE" in str(error)
        if processes.count() > 1 and (unreachable or _CONTACT_ERRORS.search(str(error))):  # of several types
            return _lose(error)
        if not isinstance(error, ConfigError | RunStopped | OSError):
            if processes.count() == 1:
                raise
            traceback.print_exc()
            return fail(1, f"{type(error).__name__}: {first_line(error)}", sys.argv)
        if isinstance(error, BrokenPipeError) and _drop_unread_output():
            return 128 + signal.SIGPIPE
        error_of = "error:" if processes.primary() else f"process {processes.index()} on {platform.node()}: error:"
        refused = isinstance(error, ConfigError)
        messages = [one_line(message) for message in (error.args if refused else [error])]
        for message in messages:
            print(error_of, message, file=sys.stderr)
        if isinstance(error, RunStopped) and processes.count() == 1:
            return 1  # a job that did not begin has told all of its processes
        return fail(2 if refused else 1, "; ".join(messages), sys.argv)


def _lose(error: Exception) -> int:
    """End this process after the loss of another one. Waits first: JAX names the lost process and ends this one."""
    print(LOST, first_line(error), file=sys.stderr, flush=True)
    time.sleep(NAMED_WITHIN_S)
    os._exit(LOST_PEER)  # a normal exit would wait for the lost process


def _drop_unread_output() -> bool:
    """If stdout is a closed pipe, drop buffered and later output and return True."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        unread = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        unread = True
    except (OSError, ValueError):  # stdout is no file
        unread = False
    if unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unread


def use_compile_cache() -> None:
    """Keep compiled programs in $SPECJAX_CACHE (default: ~/.cache/specjax/jax), unless JAX already has a cache."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        directory = os.environ.get("SPECJAX_CACHE") or Path.home() / ".cache" / "specjax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@dataclass(frozen=True)
class NoOptions:
    """Options of a program that has only the recipe's options."""


def parse_run(argv: Sequence[str], prog: str, description: str, reading: Sequence[str] = TRAIN) -> RunConfig:
    """Return the recipe named by argv[0], with the options after it applied: `CONFIG [--section.field VALUE ...]`.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    return parse_run_and(NoOptions, argv, prog, description, reading)[0]


def parse_run_and(
    kind: type[T], argv: Sequence[str], prog: str, description: str, reading: Sequence[str] = TRAIN, **defaults: Any
) -> tuple[RunConfig, T]:
    """Parse as `parse_run` does, for a program that also has its own options: the fields of the dataclass `kind`.

    In programs that read the loss, --algorithm changes the recipe before the other options, and prints what it set.
    Programs that read the advantage refuse groups of one sample if the baseline is the group. A recipe's number of
    microbatches becomes one that divides the batch; one that is given must divide it.

    If CONFIG is the directory of a run, the program reads its checkpoint, unless --checkpoint says otherwise, and
    --resume continues it.

    reading:  the recipe's options that the program reads (launch.cli.recipe_options) and therefore accepts.
    defaults: fields of the recipe that have another default in this program.
    """
    recipe = None
    if argv and not argv[0].startswith("-"):
        with as_config_error():
            recipe = replace(load_recipe(argv[0]), **defaults)
    all_fields = list(fields_of(RunConfig, recipe))
    settable = [field for field in all_fields if reads(reading, field.path) and not reads(RECIPE_ONLY, field.path)]
    sections = {name: _section_parser(name, settable) for name in dict.fromkeys(["run", *map(_section, settable)])}
    programs_own = [_ALGORITHM_OPTION] if reads(reading, "loss.function") else []
    programs_own += fields_of(kind)
    usage = f"{_as_started(prog)} CONFIG [--option VALUE ...]"
    overview = _overview_parser(usage, description, programs_own, [*sections])
    elsewhere = {
        field.flag: f"set {field.path} in a recipe file"
        if reads(RECIPE_ONLY, field.path)
        else f"{prog.rpartition(' ')[2]} does not read it"
        for field in all_fields
    }
    parser = Parser(parents=[overview, *sections.values()])
    values = parser.read(argv if recipe is None else argv[1:], [*programs_own, *settable], elsewhere)
    if "help" in values:
        topic = " ".join(values["help"])
        parsers = {"": [overview], "all": sections.values()}.get(topic)
        parsers = parsers or _on_topic(topic, sections, [*programs_own, *settable], all_fields, elsewhere)
        print("\n".join(each.format_help() for each in parsers), end="")
        raise SystemExit(0)
    if recipe is None:
        raise ConfigError(f"CONFIG must come first: {choices()}")
    if is_run(argv[0]):
        reads_checkpoint = any(field.path == "checkpoint" for field in programs_own)
        _refuse_other_networks(recipe, values, new_run=not (reads_checkpoint or values.get("resume")))
        if reads_checkpoint:
            values.setdefault("checkpoint", argv[0])
        if values.get("resume"):
            values.setdefault("out", argv[0])
    algorithm = values.pop("algorithm", None)
    for field in programs_own:
        if field.default is MISSING and field.path not in values:
            raise ConfigError(f"{field.flag} {field.metavar}: must be set. {field.help}")
    given, values = values, with_consequences(recipe, values)
    with as_config_error():
        program_values = {field.path: values.pop(field.path) for field in programs_own if field.path in values}
        required = {field.path: program_values.pop(field.path) for field in programs_own if field.default is MISSING}
        options = override(kind(**required), program_values)
        config = override(recipe, values) if algorithm is None else with_algorithm(recipe, algorithm, values)
        if "microbatches" not in values:
            config = with_fitting_microbatches(config)
        if reads(reading, "advantage"):
            check_groups(config)
    if algorithm is not None:
        print(describe(algorithm, config, values))
    for line in without_effect(recipe, config, given, reading):
        print(line)
    return config, options


def _on_topic(
    topic: str,
    sections: Mapping[str, Parser],
    fields: Sequence[Field],
    all_fields: Sequence[Field],
    elsewhere: Mapping[str, str],
) -> list[Parser]:
    """Return parsers with the help on a section, or on the options that a word names or describes.

    fields:     those that the program takes.
    all_fields: the fields of a recipe.
    elsewhere:  by flag, why the program may not take a field.

    Raises ConfigError if there is nothing on the topic.
    """
    if (section := topic.replace("-", "_")) in sections:
        return [sections[section]]
    if found := matching(topic, fields):
        return [_group_parser(f"options for {topic!r}", found)]
    others = "; ".join(f"{each.flag}: {elsewhere[each.flag]}" for each in matching(topic, all_fields)[:6])
    allowed = f"must be another word, all, or a section: {', '.join(sections)}"
    raise ConfigError(f"--help {topic!r}: {others or f'no option names or describes it; {allowed}'}")


def _refuse_other_networks(run: RunConfig, values: Mapping[str, Any], new_run: bool) -> None:
    """Raise ConfigError if other networks are asked for than those of the run that CONFIG names.

    Options of the run follow from its networks. The files of its model may have moved, which a new run cannot tell from
    another model.
    """
    for name in ("draft.kind", "data.tokenizer", *(["model.path"] if new_run else [])):
        section, _, field = name.partition(".")
        own = getattr(getattr(run, section), field)
        if values.get(name, own) != own:
            raise ConfigError(
                f"{name} = {values[name]}: must be {own}, as in the run; give a recipe as CONFIG for others"
            )


def with_consequences(recipe: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options, with what follows from them where the recipe would stand in the way.

    - A draft length fixes it, where a recipe chooses among several.
    - A draft of another kind is not described by the fields of the recipe's; one from files has its own vocabulary.
    - Without a draft there is nothing to draft with or to distil.
    - The learning rate of adapters is ten times that of all weights.
    - A scorer within the program compares token ids, and cannot leave thinking out.
    """
    draft, follows = recipe.draft, dict[str, Any]()
    kind = values.get("draft.kind", draft.kind)
    if "rollout.draft_length" in values:
        follows["rollout.draft_lengths"] = ()
    if kind != draft.kind and kind in DRAFT_KINDS:
        kept = ("vocab_size",) if {kind, draft.kind} <= set(HEADS) else ()
        follows |= {f"draft.{name}": getattr(DraftConfig, name) for name in _OF_A_KIND if name not in kept}
    if kind in HEADS and values.get("draft.path", draft.path) is not None:
        follows["draft.vocab_size"] = None
    if kind == "none":
        follows |= {"draft.rollout_dtype": None, "distill.steps": 0}
        if values.get("draft.lookup.kind", draft.lookup.kind) == "none":
            follows |= {"rollout.draft_length": 0, "rollout.draft_lengths": ()}
    lora = bool(values.get("lora.rank", recipe.lora.rank) or values.get("lora.path", recipe.lora.path))
    if lora != recipe.lora.enabled:
        rate = recipe.policy_optimizer.learning_rate * LORA_RATE ** (1 if lora else -1)
        # 1e-06 * 10 is 9.999999999999999e-06.
        follows["policy_optimizer.learning_rate"] = float(f"{rate:.12g}")
    if values.get("reward.scorer", recipe.reward.scorer) == TRACED:
        follows["reward.thinking"] = ()
    return follows | dict(values)


def parse(kind: type[T], argv: Sequence[str], prog: str, description: str | None = None, **defaults: Any) -> T:
    """Return a dataclass from a command line. Fields without a default are positional, the others are options.

    defaults: fields with another value unless an option sets them.

    Raises ConfigError for bad input; --help raises SystemExit(0).
    """
    fields = list(fields_of(kind))
    parser = Parser(prog=_as_started(prog), description=description or summary(kind), add_help=True)
    for field in fields:
        field.add_to(parser, positional=field.default is MISSING)
    with as_config_error():
        return kind(**defaults | parser.read(argv, fields, {}))


def _as_started(prog: str) -> str:
    """Return the words that started a program: `specjax train` (launch.__main__), or `prog`."""
    return sys.argv[0] if sys.argv[0].endswith(f" {prog.rpartition('.')[2]}") else prog


def _overview_parser(usage: str, description: str, fields: Sequence[Field], sections: Sequence[str]) -> Parser:
    """Return a parser of a program's own options and --help. Its help lists the sections of the recipe."""
    epilog = "\n".join(["options of the recipe:", *(f"  {name:18}{_title(name)}" for name in sections)])
    parser = Parser(usage=usage, description=f"{description}\nCONFIG is {choices()}.", epilog=epilog)
    parser.add_argument(
        *("-h", "--help"),
        nargs="*",
        metavar="WORD",
        help="Show this; the options of a section, or of all; or those that another word names or describes.",
    )
    for field in fields:
        field.add_to(parser)
    return parser


def _section_parser(name: str, fields: Sequence[Field]) -> Parser:
    """Return a parser of the options in one section of the recipe."""
    return _group_parser(f"{name}: {_title(name)}", [field for field in fields if _section(field) == name])


def _group_parser(title: str, fields: Sequence[Field]) -> Parser:
    parser = Parser(usage=argparse.SUPPRESS)
    group = parser.add_argument_group(title)
    for field in fields:
        field.add_to(group)
    return parser


def _section(field: Field) -> str:
    return field.path.split(".")[0] if "." in field.path else "run"


def _title(section: str) -> str:
    return summary(get_type_hints(RunConfig).get(section, RunConfig)).rstrip(".")
