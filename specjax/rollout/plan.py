"""How a rollout is laid out: its options, and the static phases that they become for a number of sequences."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Array, Int

from specjax.choices import check_choices
from specjax.sampling import SamplingLaw
from specjax.verify import Verifier, VerifierName


class Phase(NamedTuple):
    """Slots that are decoded together, and the most positions a row may hold while they are."""

    slots: int
    window: int


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated.

    Attributes:
        group_size:     samples of each prompt.
        max_new_tokens: length budget of a completion, the same with and without speculation.
        draft_length:   K, tokens proposed a round; 0 is plain autoregressive sampling.
        draft_lengths:  choose K for each phase of a training step among these by what rounds cost and how much is
                        accepted; empty keeps to draft_length, as evaluation and generation always do.
        verifier:       `rejection` keeps the law; so does `block`, which accepts more of a sampled draft; `coupled`
                        keeps the very tokens (specjax.verify). In Python also a Verifier of one's own.
        stop_tokens:    each ends a completion and is part of it.
        phases:         (slots, window) on each data shard: how many sequences are decoded together, and how many
                        positions a row may hold by then. Slots only fall: sequences wait for one of the first, and
                        the batch shrinks as they run out. A window is at least the prompts' padded width. A phase whose
                        window its rows have outgrown is passed over; each number of slots ends with all positions,
                        whether listed or not. Empty decodes all at once.
        admit:          slots that must be free before waiting sequences are let in; 0 takes an eighth of the first.
        kept_prompts:   prompts whose caches are kept while samples of theirs wait; 0 takes as many as `admit` fills.
    """

    group_size: int = 8
    max_new_tokens: int = 128
    draft_length: int = 3
    draft_lengths: tuple[int, ...] = ()
    verifier: VerifierName | Verifier = "rejection"
    law: SamplingLaw = field(default_factory=SamplingLaw)
    stop_tokens: tuple[int, ...] = ()
    phases: tuple[tuple[int, int], ...] = ()
    admit: int = 0
    kept_prompts: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        least = {"group_size": 1, "max_new_tokens": 1, "draft_length": 0, "admit": 0, "kept_prompts": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {value}")
        if sorted(set(self.draft_lengths)) != list(self.draft_lengths) or min(self.draft_lengths, default=0) < 0:
            raise ValueError(f"draft_lengths = {self.draft_lengths}: must be ascending, each at least 0")
        slots = [slots for slots, _ in self.phases]
        if min((number for phase in self.phases for number in phase), default=1) < 1 or slots != sorted(slots)[::-1]:
            raise ValueError(f"phases = {self.phases}: must be (slots, window) of at least 1, and slots never rise")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every draft length that a phase may run at."""
        return self.draft_lengths or (self.draft_length,)

    @property
    def slack(self) -> int:
        """Columns beyond the last position that counts, for what a verification writes and may have to drop."""
        return max(self.lengths) + 1


@dataclass(frozen=True)
class ChosenConfig(RolloutConfig):
    """A rollout's options with each phase's draft length filled in.

    chosen: int32 [phases], an index into draft_lengths for each phase that `lay_out` gives. It may be traced: another
    choice is not another program.
    """

    chosen: Int[Array, "phases"] | None = None


def lay_out(config: RolloutConfig, sequences: int, prompt_width: int) -> tuple[Phase, ...]:
    """The phases of one data shard with so many sequences, of prompts padded to `prompt_width`.

    No more slots than sequences, no wider than the longest row; those of the same slots in rising windows, the last of
    which holds any row.
    """
    longest = prompt_width + config.max_new_tokens
    listed = config.phases or ((sequences, longest),)
    laid = {(min(slots, sequences), min(window, longest)) for slots, window in listed if window >= prompt_width}
    laid |= {(min(slots, sequences), longest) for slots, _ in listed}
    return tuple(Phase(slots, window) for slots, window in sorted(laid, key=lambda phase: (-phase[0], phase[1])))


def admission(config: RolloutConfig, slots: int) -> tuple[int, int]:
    """(slots that must be free to let sequences in, prompts prefilled at a time) where the first phase has `slots`."""
    rows = min(config.admit or max(slots // 8, 1), slots)
    return rows, config.kept_prompts or -(-rows // config.group_size)
