"""The options of launch.evaluate."""

from dataclasses import dataclass

from launch.cli.paths import check_writable
from specjax.checkpoint import Which


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs:
    """Options of launch.evaluate alone.

    Attributes:
        checkpoint:      the directory of a run; None takes the networks as the recipe starts them.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        files:           JSONL files of problems, with the fields that the data section names; empty takes the recipe's
                         held-out problems.
        prompts:         use the first so many of each set; None takes all.
        samples:         completions of each prompt.
        k:               of pass@k and majority@k, each within 1 .. samples; empty takes the powers of two.
        json:            a file for the numbers.
        save:            a JSONL file for the completions: set, id of the prompt (its place in the set), completion,
                         reward.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    files: tuple[str, ...] = ()
    prompts: int | None = None
    samples: int = 1
    k: tuple[int, ...] = ()
    json: str | None = None
    save: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not all(1 <= k <= self.samples for k in self.k):
            raise ValueError(f"k = {self.k}: each must be within 1 .. samples = {self.samples}")
        for name in ("json", "save"):
            check_writable(name, getattr(self, name))

    @property
    def larger_k(self) -> tuple[int, ...]:
        """The k's above 1, ascending; k = 1 is the accuracy."""
        powers = (2**i for i in range(1, self.samples.bit_length()))
        return tuple(k for k in sorted(set(self.k or powers)) if k > 1)
