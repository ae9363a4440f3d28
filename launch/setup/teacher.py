"""Construction of the teacher from whom a policy learns: a checkpoint, or the policy without its adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.data.hub import checkpoint_directory
from launch.data.tokenizer_files import listed_stop_tokens, load_tokenizer
from launch.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from launch.errors import ConfigError, as_config_error
from launch.setup.networks import Networks
from launch.setup.policy import build_decoder, longest_sequence
from models.config import DecoderConfig
from models.decoder import make_policy
from models.files import errors_name
from specjax.checkpoint_integrity import fingerprint
from specjax.options import show
from specjax.parallel.memory import MemoryPart, bytes_per_device, check_memory
from specjax.quantization import quantized
from specjax.short_repr import short_repr
from specjax.train.hints import HintTemplate
from specjax.types import Policy, PyTree
from specjax.vocabulary import with_tokens


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher as functions, and its parameters.

    Attributes:
        policy:      the teacher's functions; ids that have no token of the policy's tokenizer have probability 0.
        params:      frozen parameters on the mesh; None if they are the policy's own.
        decoder:     config of a network of its own.
        hash:        hash of the parameters; None without own ones.
        stop_tokens: ids that end its own answers; () if its files name none.
        hints:       where hints stand in its prompts; None without.
    """

    policy: Policy
    params: PyTree | None = None
    decoder: DecoderConfig | None = None
    hash: str | None = None
    stop_tokens: tuple[int, ...] = ()
    hints: HintTemplate | None = None

    __repr__ = short_repr


def build_teacher(
    config: RunConfig, networks: Networks, tokenizer: Tokenizer, mesh: Mesh, *, shapes: bool = False
) -> Teacher | None:
    """Build the teacher of a run; None without one.

    shapes: build the parameters as ShapeDtypeStructs, and read only `config.json`.

    Raises ConfigError if its tokenizer is another than the policy's, or the devices cannot hold it.
    """
    options = config.teacher
    if options.kind == "none":
        return None
    hints = None if options.hint == "none" else hint_template(options.hint_text, tokenizer)
    if options.path is None:
        return Teacher(networks.policy, hints=hints)
    owner = f"teacher.path = {options.path}"
    directory = checkpoint_directory("teacher.path", options.path)
    stop_tokens = () if shapes else _checked_stop_tokens(owner, directory, config, tokenizer)
    model = replace(config.model, path=str(directory), param_dtype=config.model.dtype, architecture=None)
    longest = longest_sequence(config)
    with as_config_error(), errors_name(owner):
        decoder, weights = build_decoder(model, mesh, None, "teacher", longest, features=None)
    if decoder.vocab_size < tokenizer.vocab_size:
        raise ConfigError(f"{owner}: its vocab_size is {decoder.vocab_size}; must be at least {tokenizer.vocab_size}")
    if not shapes:
        size = bytes_per_device(weights)
        remedy = "must be more, or the teacher smaller"
        with as_config_error():
            check_memory([MemoryPart(f"the teacher, {owner}", size, "mesh.fsdp", config.mesh.fsdp, remedy)], mesh)
            decoder, weights = build_decoder(model, mesh, jax.random.key(0), "teacher", longest, features=None)
    if options.weight_dtype is not None:
        with as_config_error():
            weights = quantized(weights, options.weight_dtype)
    policy = make_policy(decoder)
    if not shapes:
        policy = with_tokens(policy, tokenizer.token_ids())
    return Teacher(policy, weights, decoder, None if shapes else fingerprint(weights), stop_tokens, hints)


def check_same_teacher(teacher: Teacher | None, extra: Mapping[str, Any]) -> None:
    """Raise ConfigError if a run that goes on has another teacher. extra: what its checkpoint stores beside arrays."""
    expected, found = extra.get("teacher"), None if teacher is None else teacher.hash
    if expected != found:
        raise ConfigError(
            f"resume: the run learnt from a teacher with the hash {expected}; that of teacher.path has {found}; must "
            "be the same weights in the same dtype"
        )


def _checked_stop_tokens(owner: str, directory: Path, config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the teacher's own stop tokens. Raises ConfigError if its tokenizer has other tokens than the policy's."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return ()
    own = load_tokenizer(directory)
    texts = {i: text for text, i in own.get_vocab().items()}
    for i in sorted(tokenizer.token_ids() & texts.keys()):
        if tokenizer.piece(i) != texts[i]:
            raise ConfigError(
                f"{owner}: its tokenizer is another than that of model.path = {config.model.path}: token {i} is "
                f"{texts[i]!r} there and {tokenizer.piece(i)!r} here; must be a teacher with the same tokenizer"
            )
    return listed_stop_tokens(own, directory)


def hint_template(text: str, tokenizer: Tokenizer) -> HintTemplate:
    """Return where a hint stands in a prompt: at the end of the question, before what opens the answer.

    text: with {hint}. What opens the answer is found on two short questions. Raises ConfigError if the tokenizer cannot
    encode the text, or writes a question otherwise.
    """
    owner = f"teacher.hint_text = {show(text)!r}"
    try:
        before, after = map(tokenizer.encode, text.split("{hint}"))
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from None
    questions = "1", "2"
    first, second = map(tokenizer.chat, questions)
    same = (a == b for a, b in zip(reversed(first), reversed(second), strict=False))
    tail = sum(1 for _ in takewhile(bool, same))
    if tail == min(len(first), len(second)) or tokenizer.encode(questions[0]) != first[-tail - 1 : len(first) - tail]:
        raise ConfigError(
            f"{owner}: the tokenizer or its chat template writes no question as it is; must be teacher.hint none"
        )
    return HintTemplate(tuple(before), tuple(after), tail)
