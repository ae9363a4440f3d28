"""The options of launch.evaluate."""

from dataclasses import dataclass

from launch.cli.paths import check_checkpoint, check_writable
from specjax.checkpoint import Which
from specjax.options import Options, Positive


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(Options):
    """Options that only launch.evaluate has.

    Attributes:
        checkpoint:      Run directory to load from. None: the networks that the recipe starts from.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        files:           Files of problems, or data sets on the hub, as data.held_out takes them. Empty: the recipe's
                         held-out problems.
        prompts:         Number of problems to use, from the start of each file. None: all.
        samples:         Completions per problem.
        k:               k of pass@k and majority@k, within 1 .. samples. Empty: powers of 2.
        json:            File for the results.
        save:            JSONL file for the completions: set, id (index in the set), completion,
                         extracted (its final answer), reward.
    """

    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    files: tuple[str, ...] = ()
    prompts: Positive | None = None
    samples: Positive = 1
    k: tuple[Positive, ...] = ()
    json: str | None = None
    save: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.k, default=1) > self.samples:
            raise ValueError(f"k = {self.k}: each must be at most samples = {self.samples}")
        for name in ("json", "save"):
            check_writable(name, getattr(self, name))
        check_checkpoint(self.checkpoint, self.checkpoint_step)

    @property
    def larger_k(self) -> tuple[int, ...]:
        """Return the values of k above 1, ascending. (k = 1 is the accuracy.)"""
        powers = (2**i for i in range(1, self.samples.bit_length()))
        return tuple(k for k in sorted(set(self.k or powers)) if k > 1)
