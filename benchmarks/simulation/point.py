"""The training step that a simulation answers for: every input is a field, and a sweep or a range changes fields."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from models.published import DECODERS
from specjax.cost import find_engine, find_hardware
from specjax.options import DraftLength, Fraction, NonNegative, Options, Positive, at_least, at_most

# Hardware of a run, whose rounds were measured.
MEASURED = "measured"
# Sequences of a replica; a simulation takes a step for each.
MOST_OF_A_REPLICA, MOST_SLOTS = 4096, 2**16
MOST_SECONDS, MOST_DRAFT_TRAINING = 1e6, 10
Seconds = Annotated[float, at_least(0), at_most(MOST_SECONDS)]
Microseconds = Annotated[float, at_least(0), at_most(1e6)]
Share = Annotated[float, at_least(1e-3), at_most(1)]
Count = Annotated[int, at_least(1), at_most(2**16)]


@dataclass(frozen=True)
class Point(Options):
    """A training step, its machine, and what is assumed of both.

    Attributes:
        model:            Published model: qwen3-0.6b to qwen3-235b-a22b, llama-3.1-8b.
        draft:            eagle3: one pass a token. block: five layers, one pass for all tokens, as DFlash.
        hardware:         a100, h20, h100, h200, b200, gb200 or cpu. With --from-run, measured: the run's own.
        engine:           specjax, or vllm-0.17: a roofline with what was fitted to published rounds.
        gpus:             GPUs in all.
        tensor:           GPUs that share each product; a replica.
        expert:           GPUs that the experts are spread over, at least tensor. In specjax they decode the same rows.
        weight_bytes:     Bytes of a weight in generation. specjax multiplies 1 as 2.
        cache_bytes:      Bytes of a number of the cache.
        sequences:        Sequences that a step trains on.
        slots:            Sequences that a replica decodes together; others wait. 0: as many as fit in memory.
        phases:           Slots that specjax's batch shrinks to. Empty: a quarter and a sixteenth, as our recipes. One
                          number, equal to slots: rounds pay for all slots until the last row ends.
        prompt_tokens:    Tokens of a prompt.
        mean_tokens:      Mean tokens of a completion.
        length_spread:    Standard deviation of the logarithm of the lengths.
        limit_tokens:     Most tokens of a completion.
        draft_length:     Tokens drafted per round (k); 0: autoregressive.
        draft_lengths:    Choose k among these at each moment. Empty: draft_length.
        acceptance_length: Tokens per verification, measured at draft length measured_at.
        measured_at:      That draft length.
        lag:              Steps by which weights of the generator may be older; 0: synchronous.
        generation_gpus:  With lag, GPUs that generate; the others train. 0: the best split. Ignored without lag.
        lora_rank:        Rank of adapters, trained in place of the policy's weights; 0: none.
        train_s:          Seconds of forward, backward and update. None: from the sheet.
        logprob_s:        Seconds of the log-prob stage. None: logprob_share of training; 0 for specjax, which has none.
        logprob_share:    That share.
        other_s:          Seconds of data, preparation and reward.
        draft_training:   Seconds of training the draft, as a share of the seconds of training the policy.
        bandwidth_share:  Share of the memory bandwidth that is reached.
        compute_share:    Share of the peak that is reached in generation.
        overlap:          Share of the shorter of reading and computing that the longer hides. For the rest each token
                          costs time, so that drafts cost more the more rows there are.
        drafted_factor:   How much longer rounds with drafts take than the model says.
        training_share:   Share of the peak reached in training, by 6 operations per parameter and token (lora_rank: 4).
        layer_us:         Latency of a layer. None: the engine's.
        draft_pass_us:    Time of a draft pass beside its roofline. None: the engine's.
        host_us:          Host time of a round. None: the engine's.
        independence:     Of the experts of neighbouring tokens: 1 if chosen independently, 0 if the same.
    """

    model: str = "qwen3-8b"
    draft: Literal["eagle3", "block"] = "eagle3"
    hardware: str = "h100"
    engine: str = "specjax"
    gpus: Count = 8
    tensor: Count = 1
    expert: Count = 1
    weight_bytes: Literal[1, 2, 4] = 2
    cache_bytes: Literal[1, 2, 4] = 2
    sequences: Count = 512
    slots: Annotated[int, at_least(0), at_most(MOST_SLOTS)] = 0
    phases: tuple[Positive, ...] = ()
    prompt_tokens: Positive = 300
    mean_tokens: Annotated[float, at_least(1), at_most(1e6)] = 2000.0
    length_spread: Annotated[float, at_least(0), at_most(4)] = 0.8
    limit_tokens: Annotated[int, at_least(1), at_most(10**6)] = 8192
    draft_length: DraftLength = 3
    draft_lengths: tuple[DraftLength, ...] = ()
    acceptance_length: Annotated[float, at_least(1), at_most(129)] = 2.8
    measured_at: Annotated[int, at_least(1), at_most(128)] = 3
    lag: Annotated[int, at_least(0), at_most(16)] = 0
    generation_gpus: NonNegative = 0
    lora_rank: Annotated[int, at_least(0), at_most(2**16)] = 0
    train_s: Seconds | None = None
    logprob_s: Seconds | None = None
    logprob_share: Annotated[float, at_least(0), at_most(10)] = 0.4
    other_s: Seconds = 2.0
    draft_training: Annotated[float, at_least(0), at_most(MOST_DRAFT_TRAINING)] = 0.0
    bandwidth_share: Share = 0.85
    compute_share: Share = 0.60
    overlap: Fraction = 0.4
    drafted_factor: Annotated[float, at_least(0.1), at_most(10)] = 1.0
    training_share: Share = 0.35
    layer_us: Microseconds | None = None
    draft_pass_us: Microseconds | None = None
    host_us: Microseconds | None = None
    independence: Fraction = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        find_engine(self.engine)
        if self.hardware != MEASURED:
            find_hardware(self.hardware).peak(self.factor_bytes)
        if self.model not in DECODERS:
            raise ValueError(f"model = {self.model}: no such model; must be one of {', '.join(DECODERS)}")
        if not self.mean_tokens <= self.limit_tokens:
            raise ValueError(f"mean_tokens = {self.mean_tokens}: must be at most limit_tokens, {self.limit_tokens}")
        if self.acceptance_length > self.measured_at + 1:
            raise ValueError(
                f"acceptance_length = {self.acceptance_length}: must be at most {self.measured_at + 1}, measured_at + 1"
            )
        if sorted(set(self.draft_lengths)) != list(self.draft_lengths):
            raise ValueError(f"draft_lengths = {self.draft_lengths}: must be ascending")
        if self.gpus % self.tensor:
            raise ValueError(f"gpus = {self.gpus}: must be a multiple of tensor, {self.tensor}")
        if self.expert > 1 and (self.expert < self.tensor or self.expert % self.tensor or self.gpus % self.expert):
            raise ValueError(
                f"expert = {self.expert}: must be a multiple of tensor, {self.tensor}, that divides gpus, {self.gpus}"
            )
        if self.sequences * self.replica > MOST_OF_A_REPLICA * self.gpus:
            raise ValueError(
                f"sequences = {self.sequences}: must be at most {MOST_OF_A_REPLICA} for each replica of "
                f"{self.replica} GPUs"
            )
        if self.lag and self.gpus < 2 * self.replica:
            raise ValueError(f"lag = {self.lag}: generation and training need GPUs of their own; gpus = {self.gpus}")
        if self.generation_gpus % self.replica or self.generation_gpus >= self.gpus:
            raise ValueError(
                f"generation_gpus = {self.generation_gpus}: must be below gpus, {self.gpus}, and a multiple of those "
                f"of a replica, {self.replica}"
            )

    @property
    def replica(self) -> int:
        """Return the GPUs that decode the same rows."""
        return max(self.tensor, self.expert) if self.engine == "specjax" else self.tensor

    @property
    def factor_bytes(self) -> int:
        """Return the bytes of a weight as it is multiplied."""
        return max(self.weight_bytes, 2) if self.engine == "specjax" else self.weight_bytes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the draft lengths to choose from."""
        return self.draft_lengths or (self.draft_length,)

    def changed(self, changes: Mapping[str, Any]) -> "Point":
        """Return the point with fields changed. Given stage times scale with its tokens, and inversely with its GPUs.

        A changed draft length replaces draft_lengths. Raises ValueError if the fields do not go together.
        """
        fixed = {"draft_lengths": ()} if "draft_length" in changes else {}
        point = replace(self, **(fixed | dict(changes)))
        scale = point.sequences * point.mean_tokens * self.gpus / (self.sequences * self.mean_tokens * point.gpus)
        times = {name: getattr(self, name) for name in ("train_s", "logprob_s") if name not in changes}
        scaled = {name: min(scale * value, MOST_SECONDS) for name, value in times.items() if value is not None}
        return replace(point, **scaled)
