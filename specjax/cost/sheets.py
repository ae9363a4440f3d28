"""Network sheets, and the cost model that follows from them and a hardware sheet: a roofline."""

from dataclasses import dataclass, replace

from specjax.cost.engines import ENGINES, EngineProfile
from specjax.cost.forward import ExpertCounts, Forward
from specjax.cost.hardware import Hardware
from specjax.cost.model import CostModel
from specjax.types import Mixture

# The vocabulary head, and a draft unless it is said, keep at least 2 bytes a weight. Logits are float32: devices that
# share the head send each other theirs, and sampling reads and writes them about 4 times.
HEAD_BYTES, LOGIT_BYTES, LOGIT_PASSES = 2, 4, 4


@dataclass(frozen=True)
class NetworkSheet:
    """Parameters of a decoder or a draft head, as far as the cost of a forward depends on them.

    Attributes:
        layers:    Number of layers.
        hidden:    Width of the residual stream.
        dense:     Parameters of all products with weights outside experts and vocabulary head, over all layers.
        heads:     Query heads.
        kv_heads:  Key and value heads.
        head_dim:  Dimensions of each head.
        vocab:     Outputs of the vocabulary head.
        mixture:   Mixture of experts; None without one.
        expert:    Parameters of one expert in one layer.
    """

    layers: int
    hidden: int
    dense: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mixture: Mixture | None = None
    expert: int = 0

    @property
    def head(self) -> int:
        """Return the parameters of the vocabulary head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the parameters of all products, the vocabulary head's included; without embeddings and norms."""
        return self._multiplied(0 if self.mixture is None else self.mixture.experts)

    @property
    def active(self) -> int:
        """Return the parameters that a token multiplies by."""
        return self._multiplied(0 if self.mixture is None else self.mixture.active)

    def _multiplied(self, experts: int) -> int:
        layers = 0 if self.mixture is None else self.mixture.layers
        return self.dense + layers * experts * self.expert + self.head

    def cache_bytes(self, each: int) -> int:
        """Return the bytes of keys and values of one position of one row. each: bytes of a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * each


@dataclass(frozen=True)
class DraftSheet:
    """Sheet of a trained draft.

    Attributes:
        network: Parameters of each pass.
        fused:   Parameters that only the first pass of a round multiplies by: EAGLE-3's projection of features.
        block:   Whether one pass drafts all tokens of a round.
        markov:  What a block draft multiplies by for each further token; None: nothing.
    """

    network: NetworkSheet
    fused: int = 0
    block: bool = False
    markov: NetworkSheet | None = None


@dataclass(frozen=True)
class Deployment:
    """How a policy is spread over devices and stored.

    Attributes:
        tensor:       Devices that share each product of the policy.
        expert:       Devices over which the experts are spread, at least `tensor`.
        same_rows:    All of these devices decode the same rows, as specjax's mesh axis `expert` does. Otherwise each
                      group of `tensor` devices decodes rows of its own.
        weight_bytes: Bytes of a weight: 4, 2, or 1 in 8 bits.
        cache_bytes:  Bytes of a number of the cache.
        factor_bytes: Bytes of a number as it is multiplied; None: as stored. specjax multiplies weights of 8 bits in
                      bfloat16, 2 bytes.
        draft_bytes:  Bytes of a weight of the draft; None: as for the policy, but at least 2.
    """

    tensor: int = 1
    expert: int = 1
    same_rows: bool = False
    weight_bytes: int = 2
    cache_bytes: int = 2
    factor_bytes: int | None = None
    draft_bytes: int | None = None

    @property
    def of_draft(self) -> "Deployment":
        """Return how the draft is spread and stored, as if it were a policy."""
        each = self.draft_bytes or max(self.weight_bytes, HEAD_BYTES)
        return replace(self, expert=1, weight_bytes=each)


@dataclass(frozen=True)
class Efficiency:
    """How near programs come to a sheet. Assumed, but for the overlap: no public figure gives them for these models.

    Attributes:
        bandwidth:    Share of the memory bandwidth.
        compute:      Share of the peak.
        overlap:      See `Forward.overlap`, on a device that overlaps. Fitted to our plain rounds of 1 to 64 rows of
                      Qwen3-8B on an H100.
        collective:   Seconds of latency of an all-reduce or all-to-all within a host.
        independence: See `ExpertCounts.independence`.
    """

    bandwidth: float = 0.85
    compute: float = 0.60
    overlap: float = 0.4
    collective: float = 8e-6
    independence: float = 1.0


def cost_model(
    policy: NetworkSheet,
    draft: DraftSheet | None,
    hardware: Hardware,
    deployment: Deployment = Deployment(),
    efficiency: Efficiency = Efficiency(),
    engine: EngineProfile = ENGINES["specjax"],
) -> CostModel:
    """Return the cost model of these sheets. draft: None for a lookup, whose passes cost nothing here.

    Raises ValueError where the hardware has no products with such weights.
    """
    verified = forward(policy, hardware, deployment, efficiency, engine.layer)
    if draft is None:
        return CostModel(verified, engine=engine)
    first = replace(draft.network, dense=draft.network.dense + draft.fused)
    later = draft.markov if draft.block else draft.network
    passes = (
        Forward() if network is None else forward(network, hardware, deployment.of_draft, efficiency, engine.layer)
        for network in (first, later)
    )
    return CostModel(verified, *passes, engine=engine, block=draft.block)


def forward(
    network: NetworkSheet, hardware: Hardware, deployment: Deployment, efficiency: Efficiency, layer: float
) -> Forward:
    """Return the constants of a network's forward. layer: seconds of latency of each layer."""
    tensor, each = deployment.tensor, deployment.weight_bytes
    span = max(deployment.expert, tensor)
    byte = 1 / (hardware.bandwidth * efficiency.bandwidth)
    flop = 1 / (hardware.peak(deployment.factor_bytes or each) * efficiency.compute)
    head_each = max(each, HEAD_BYTES)
    head_flop = 1 / (hardware.peak(head_each) * efficiency.compute)
    # A layer exchanges twice: after attention and after its MLP. An all-reduce moves each number twice, in 2 bytes.
    exchanges = 2 * network.layers if span > 1 else 0
    sent = hardware.between(span)
    mixture = network.mixture
    experts, expert, expert_product = None, 0.0, 0.0
    if mixture is not None:
        # Groups of rows whose tokens meet at the experts.
        groups = 1 if deployment.same_rows else span / tensor
        experts = ExpertCounts(mixture.experts, mixture.active, groups, efficiency.independence)
        expert = byte * mixture.layers * network.expert * each / span
        expert_product = flop * 2 * mixture.layers * mixture.active * network.expert * groups / span
    return Forward(
        # The vocabulary head and the sampler count as a layer.
        fixed=layer * (network.layers + 1) + exchanges * efficiency.collective,
        weights=byte * network.dense * each / tensor,
        product=flop * 2 * network.dense / tensor,
        expert=expert,
        expert_product=expert_product,
        cached=byte * network.cache_bytes(deployment.cache_bytes) / min(tensor, network.kv_heads),
        attended=4 * network.layers * network.heads * network.head_dim * head_flop / tensor,
        head=byte * network.head * head_each / tensor,
        score=head_flop * 2 * network.head / tensor,
        sample=network.vocab * LOGIT_BYTES * (byte * LOGIT_PASSES + (1 / sent if tensor > 1 else 0.0)),
        exchange=exchanges * network.hidden * 4 / sent,
        experts=experts,
        query_group=network.heads // network.kv_heads,
        overlap=efficiency.overlap if hardware.overlapped else 0.0,
    )
