"""Rollout options, and the static phases that follow from them and the number of sequences."""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.environments import Environment, HostEnvironment
from specjax.options import DraftLength, NonNegative, Options, Positive, above, below
from specjax.rollout.stop_strings import StopAutomaton, automaton_of, check_stop_strings
from specjax.sampling import SamplingLaw
from specjax.verify import Verifier, VerifierName


class Phase(NamedTuple):
    """A phase of a rollout: the number of slots decoded together, and the most positions that a row may hold."""

    slots: int
    window: int


@dataclass(frozen=True)
class RolloutConfig(Options):
    """Options of generation.

    Attributes:
        group_size:     Completions per prompt.
        max_new_tokens: Most tokens of a completion.
        draft_length:   Tokens drafted per round (k); 0: autoregressive decoding.
        draft_lengths:  Choose k among these per phase, by measured cost and acceptance. Empty: draft_length.
        verifier:       `rejection` and `block` keep the distribution, `coupled` keeps the tokens.
                        In Python also a Verifier of your own.
        law:            Sampling distribution.
        stop_tokens:    Tokens that end a completion.
        stop_strings:   Texts that end a completion with the token that completes one. In Python StopStrings.
        phases:         (slots, window) per data shard: sequences decoded together, and positions a row may hold. Slots
                        never rise: sequences wait for one, then the batch shrinks. Empty: all at once.
        admit:          Slots that must be free before waiting sequences enter; 0: an eighth of the first phase's.
        kept_prompts:   Prompts whose caches are kept while samples of theirs wait; 0: as many as `admit` fills.
        carry_over:     Share of the prompts to finish and train on per step.
        max_age:        Drop groups unfinished after so many updates. None: never.
        environment:    Answers between the turns of a sequence. None: one turn.
        turns:          Most turns of a sequence.
        turn_tokens:    Most tokens that are drawn in a turn. None: as many as the completion may have.
    """

    group_size: Positive = 8
    max_new_tokens: Positive = 128
    draft_length: DraftLength = 3
    draft_lengths: tuple[DraftLength, ...] = ()
    verifier: VerifierName | Verifier = "rejection"
    law: SamplingLaw = field(default_factory=SamplingLaw)
    stop_tokens: tuple[NonNegative, ...] = ()
    stop_strings: tuple[str, ...] = ()
    phases: tuple[tuple[Positive, Positive], ...] = ()
    admit: NonNegative = 0
    kept_prompts: NonNegative = 0
    carry_over: Annotated[float, above(0), below(1)] | None = None
    max_age: Positive | None = None
    environment: Environment | HostEnvironment | None = None
    turns: Positive = 8
    turn_tokens: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stop_strings(self.stop_strings)
        if sorted(set(self.draft_lengths)) != list(self.draft_lengths):
            raise ValueError(f"draft_lengths = {self.draft_lengths}: must be ascending")
        slots = [slots for slots, _ in self.phases]
        if slots != sorted(slots)[::-1]:
            raise ValueError(f"phases = {self.phases}: must be (slots, window), and slots never rise")
        if self.max_age is not None and self.carry_over is None:
            raise ValueError(f"max_age = {self.max_age}: must be None without carry_over")
        if self.environment is not None and self.carry_over is not None:
            raise ValueError(f"carry_over = {self.carry_over}: must be None with an environment")
        if self.environment is not None and self.environment.width < 1:
            raise ValueError(f"environment.width = {self.environment.width}: must be at least 1")
        if self.answers_on_host and self.phases:
            raise ValueError(f"phases = {self.phases}: must be empty with an environment on the host")

    @property
    def answers_on_host(self) -> bool:
        """Return whether there is an environment on the host, so that the rollout is no single program."""
        return self.environment is not None and not isinstance(self.environment, Environment)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return all draft lengths that a phase may run at."""
        return self.draft_lengths or (self.draft_length,)

    @property
    def stop_automaton(self) -> StopAutomaton | None:
        """Return what finds the stop strings in tokens; None without any. Raises ValueError for plain text."""
        return automaton_of(self.stop_strings)

    def length_index(self, phase: int) -> Int[Array, ""] | int:
        """Return the index into `lengths` of the phase's draft length."""
        if len(self.lengths) > 1:
            raise ValueError(f"draft_lengths = {self.draft_lengths}: none is chosen for phase {phase}")
        return 0

    def draft_length_in(self, phase: int) -> Int[Array, ""]:
        """Return the draft length of the phase."""
        return jnp.array(self.lengths)[self.length_index(phase)]

    def finished_groups(self, groups: int) -> int:
        """Return how many of so many groups a rollout finishes: all without carry-over."""
        # Rounded, because shares are not exact: 0.7 of 10 are 7.
        return groups if self.carry_over is None else math.floor(round(self.carry_over * groups, 6))

    def left_over(self, sequences: int) -> int:
        """Return the most sequences of so many that a rollout leaves unfinished for the next one."""
        groups = sequences // self.group_size
        return (groups - self.finished_groups(groups)) * self.group_size

    @property
    def slack(self) -> int:
        """Return the columns needed beyond the last position that counts: verification writes there before the cut."""
        return max(self.lengths) + 1

    @property
    def room(self) -> int:
        """Return the positions that arrays need beyond the last that counts: for a verification, or an observation."""
        return self.slack if self.environment is None else max(self.slack, self.environment.width)


@dataclass(frozen=True)
class ChosenConfig(RolloutConfig):
    """Rollout options with the draft length of each phase filled in (`choose_lengths`).

    chosen: int32 [phases], an index into `lengths` for each phase that `lay_out` returns. It may be traced, so that
            another choice needs no other program. Or one index for all phases: rounds of other draft lengths are then
            not compiled.
    """

    chosen: Int[Array, "phases"] | int = field(kw_only=True)

    def length_index(self, phase: int) -> Int[Array, ""] | int:
        return self.chosen if isinstance(self.chosen, int) else self.chosen[phase]


def choose_lengths(config: RolloutConfig, chosen: Int[Array, "phases"] | int | None) -> RolloutConfig:
    """Return the options with these draft lengths filled in; unchanged if `chosen` is None."""
    if chosen is None:
        return config
    kind = type(config)
    if kind is RolloutConfig:
        kind = ChosenConfig
    elif not issubclass(kind, ChosenConfig):
        # Keep the fields and methods that a subclass adds.
        kind = dataclass(frozen=True)(type(kind.__name__, (ChosenConfig, kind), {}))
    values: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
    values["chosen"] = chosen
    return kind(**values)


def lay_out(config: RolloutConfig, sequences: int, prompt_width: int) -> tuple[Phase, ...]:
    """Return the phases of one data shard with `sequences` sequences, of prompts padded to `prompt_width`.

    Slots are capped at the number of sequences, windows at the longest possible row. Phases of the same slots have
    rising windows, and the last of them holds any row. With carry-over, each has slots for the rows left over.
    Raises ValueError if draft lengths are chosen for another number of phases.
    """
    longest = prompt_width + config.max_new_tokens
    fewest = max(config.left_over(sequences), 1)
    listed = tuple((max(slots, fewest), window) for slots, window in config.phases or ((sequences, longest),))
    laid = {(min(slots, sequences), min(window, longest)) for slots, window in listed if window >= prompt_width}
    laid |= {(min(slots, sequences), longest) for slots, _ in listed}
    phases = tuple(Phase(slots, window) for slots, window in sorted(laid, key=lambda phase: (-phase[0], phase[1])))
    chosen = config.chosen if isinstance(config, ChosenConfig) else 0
    if not isinstance(chosen, int) and chosen.shape != (len(phases),):
        raise ValueError(f"chosen: of shape {chosen.shape}, must be {(len(phases),)}, an index for each phase")
    return phases


def admission(config: RolloutConfig, slots: int) -> tuple[int, int]:
    """Return (slots that must be free before sequences are admitted, prompts prefilled at a time).

    slots: those of the first phase.
    """
    rows = min(config.admit or max(slots // 8, 1), slots)
    return rows, config.kept_prompts or -(-rows // config.group_size)
