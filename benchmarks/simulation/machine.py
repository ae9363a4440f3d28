"""Seconds of rounds, seconds of stages, and memory, of a point: from the sheets of its model, device and engine."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.lengths import Lengths, with_mean
from benchmarks.simulation.measured import measured_rounds
from benchmarks.simulation.point import MEASURED, Point
from benchmarks.simulation.step import StageSeconds
from benchmarks.simulation.surface import RoundSeconds
from launch.predict.memory import USABLE
from models.config import DecoderConfig, block_feature_layers
from models.drafts.block import block_like
from models.published import DECODERS, eagle3_config
from models.sheets import block_sheet, decoder_sheet, eagle3_sheet
from specjax.cost import (
    Cell,
    CostModel,
    Deployment,
    DraftSheet,
    Efficiency,
    NetworkSheet,
    cost_model,
    find_engine,
    find_hardware,
)
from specjax.rollout.plan import Phase
from specjax.types import Mixture

# Bytes per parameter of a training state: master weights, two moments of Adam and gradients in float32.
TRAINING_BYTES = 16
# Operations per parameter and token: forward 2, backward 4. Published shares of the peak count only these: what is
# computed again lowers the share.
TRAINING_FLOPS = 6
# Beside adapters the backward pass takes 2: frozen weights have no gradient.
ADAPTER_FLOPS = 4


class Evidence(NamedTuple):
    """Measurements of a run, which replace what a sheet says.

    lengths: completion lengths, in tokens; empty: lognormal.
    cells:   measured rounds.
    phases:  of the rollout whose rounds were measured.
    mixture: its policy's experts.
    steps:   acceptance length of each step.
    generation_s: measured seconds of generation; 0: not measured.
    modelled_s:   those that the simulation gives for the run as it was.
    acceptance_assumed: nobody gave an acceptance length: the point's is the default.
    notes:        lines on what the run does not tell.
    """

    lengths: tuple[float, ...] = ()
    cells: tuple[Cell, ...] = ()
    phases: tuple[Phase, ...] = ()
    mixture: Mixture | None = None
    steps: tuple[float, ...] = ()
    acceptance_assumed: bool = False
    generation_s: float = 0.0
    modelled_s: float = 0.0
    notes: tuple[str, ...] = ()


def completion_lengths(point: Point, evidence: Evidence) -> Lengths:
    """Return the distribution of completion lengths. Measured ones are scaled to the point's mean."""
    if not evidence.lengths:
        return with_mean(point.mean_tokens, point.length_spread, point.limit_tokens)
    scale = point.mean_tokens / float(np.mean(evidence.lengths))
    return Lengths(1.0, 0.0, point.limit_tokens, tuple(scale * length for length in evidence.lengths))


def round_costs(point: Point, evidence: Evidence) -> RoundSeconds:
    """Return the seconds of a round by rows, positions and draft length."""
    if point.hardware == MEASURED:
        longest = point.prompt_tokens + point.limit_tokens
        return measured_rounds(evidence.cells, evidence.phases, evidence.mixture, longest)
    model = sheet_model(point)
    return lambda rows, positions, k: model.seconds(rows, positions, k) * (point.drafted_factor if k else 1.0)


def sheet_model(point: Point) -> CostModel:
    """Return the cost model of the point's sheets."""
    engine = find_engine(point.engine)
    microseconds = {"layer": point.layer_us, "draft_pass": point.draft_pass_us, "host": point.host_us}
    engine = replace(engine, **{name: 1e-6 * value for name, value in microseconds.items() if value is not None})
    efficiency = Efficiency(point.bandwidth_share, point.compute_share, point.overlap, independence=point.independence)
    return cost_model(
        network(point), draft_sheet(point), find_hardware(point.hardware), deployment(point), efficiency, engine
    )


def deployment(point: Point) -> Deployment:
    """Return how the point's policy is spread and stored."""
    return Deployment(
        tensor=point.tensor,
        expert=point.expert,
        same_rows=point.engine == "specjax",
        weight_bytes=point.weight_bytes,
        cache_bytes=point.cache_bytes,
        factor_bytes=point.factor_bytes,
    )


def decoder(point: Point) -> DecoderConfig:
    """Return the config of the point's model."""
    return DECODERS[point.model]


def network(point: Point) -> NetworkSheet:
    """Return the sheet of the point's model."""
    return decoder_sheet(decoder(point))


def draft_sheet(point: Point) -> DraftSheet:
    """Return the sheet of the point's draft."""
    head = eagle3_config(point.model)
    if point.draft == "eagle3":
        return eagle3_sheet(head)
    policy = decoder(point)
    policy = replace(policy, feature_layers=block_feature_layers(policy.num_layers))
    return block_sheet(block_like(policy, max(*point.lengths, 1), intermediate_size=head.intermediate_size))


def stages(point: Point, tokens: float, gpus: int) -> StageSeconds:
    """Return the seconds of the stages beside generation.

    tokens: of the prompts and completions of a step. gpus: those that train.
    """
    scale = point.gpus / gpus
    if point.hardware == MEASURED:
        train, logprob = scale * (point.train_s or 0.0), scale * (point.logprob_s or 0.0)
        return StageSeconds(point.other_s, logprob, train, point.draft_training * train)
    sheet, device = network(point), find_hardware(point.hardware)
    operations = tokens * sheet.active / (gpus * device.bf16 * point.training_share)
    flops = ADAPTER_FLOPS if point.lora_rank else TRAINING_FLOPS
    train = flops * operations if point.train_s is None else point.train_s * scale
    # The share is that of full training.
    logprob = 0.0 if point.engine == "specjax" else point.logprob_share * train * TRAINING_FLOPS / flops
    if point.logprob_s is not None:
        logprob = point.logprob_s * scale
    moved = 0.0
    if point.engine != "specjax" or point.lag:
        sent = adapter_parameters(point) if point.lora_rank else sheet.parameters
        moved = sent * point.weight_bytes / max(point.tensor, point.expert) / device.network
    return StageSeconds(point.other_s, logprob, train, point.draft_training * train, moved)


def adapter_parameters(point: Point) -> int:
    """Return the parameters of the adapters of the point's model; experts have none."""
    config = decoder(point)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlps = config.num_layers - len(config.expert_layers)
    widths = config.num_layers * (4 * config.hidden_size + 2 * queries + 2 * keys)
    return point.lora_rank * (widths + 3 * mlps * (config.hidden_size + config.intermediate_size))


class MemoryNeeds(NamedTuple):
    """Memory of a device, in bytes: generation's weights, training state, cache of one sequence, the device's own."""

    weights: float
    training: float
    sequence: float
    device: float

    @property
    def fixed(self) -> float:
        """Bytes that are needed before any sequence."""
        return self.weights + self.training

    @property
    def slots(self) -> int:
        """Sequences of a replica whose caches fit beside the rest; below 1 if that does not fit."""
        return int((USABLE * self.device - self.fixed) // self.sequence)


def memory(point: Point, mean_positions: float) -> MemoryNeeds:
    """Return the memory of a device.

    specjax keeps caches of the longest row, and without lag the training state beside them, spread over all GPUs. Other
    engines page caches by the mean length, and move the training state out. With lora_rank it is that of adapters and
    draft: generation and training read the same frozen weights.
    """
    sheet, draft, device = network(point), draft_sheet(point), find_hardware(point.hardware)
    model, bandwidth = sheet_model(point), device.bandwidth * point.bandwidth_share
    policy, drafter = model.policy, model.first
    experts = 0 if sheet.mixture is None else sheet.mixture.experts
    # An embedding that is not the vocabulary head is as large.
    tables = 1 if decoder(point).tie_embeddings else 2
    # What a forward reads is what the device holds of each network.
    reading = policy.weights + experts * policy.expert + tables * policy.head + drafter.weights + drafter.head
    longest = point.prompt_tokens + point.limit_tokens
    positions = longest if point.engine == "specjax" else mean_positions
    trained = adapter_parameters(point) if point.lora_rank else sheet.parameters + (tables - 1) * sheet.head
    training = TRAINING_BYTES * (trained + draft.network.parameters + draft.fused) / point.gpus
    beside = training if point.engine == "specjax" and not point.lag else 0.0
    sequence = positions * (policy.cached + drafter.cached)
    return MemoryNeeds(bandwidth * reading, beside, bandwidth * sequence, device.memory)
