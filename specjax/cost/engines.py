"""Engine profiles: what an inference engine adds to the roofline of a round.

A roofline explains rounds of large models. It does not explain those that arXiv 2604.26779 measured for an 8B model:
see docs/cost_model.md.
"""

from dataclasses import dataclass

import numpy as np

# Latency of a layer in a captured program: about 8 kernels of 2 microseconds.
LAYER = 15e-6


@dataclass(frozen=True)
class EngineProfile:
    """Costs of an engine beside the costs of reading and computing. Times in seconds.

    Attributes:
        name:       Name for tables.
        source:     What the figures come from.
        layer:      Latency of each layer of a forward, beside its roofline.
        host:       Host seconds of a round.
        draft_pass: Seconds of each draft pass beside its roofline.
        attention:  Points (query rows, factor) of a line by which attention is slower than its roofline. Query rows:
                    tokens in one verification of a row, times query heads per key-value head. Constant beyond the ends;
                    () for a factor of 1.
    """

    name: str
    source: str
    layer: float = LAYER
    host: float = 0.0
    draft_pass: float = 0.0
    attention: tuple[tuple[float, float], ...] = ()

    def attention_factor(self, query_rows: int) -> float:
        """Return how much slower attention is than its roofline."""
        if not self.attention:
            return 1.0
        rows, factors = zip(*self.attention, strict=True)
        return float(np.interp(query_rows, rows, factors))


_TILES = "its attention kernel takes tiles of 16 query rows up to 16, of 64 above (FlashInfer's FA2DetermineCtaTileQ)"

ENGINES = {
    "specjax": EngineProfile("specjax", "one program, no host between rounds; layer: assumed"),
    "vllm-0.17": EngineProfile(
        "vllm-0.17",
        "draft pass and attention fitted to RL-Zero at k = 3 and 5 of arXiv 2604.26779, on GB200; "
        f"attention: a guess, {_TILES}",
        host=0.3e-3,
        draft_pass=0.92e-3,
        attention=((16.0, 1.0), (64.0, 35.9)),
    ),
}


def find_engine(name: str) -> EngineProfile:
    """Return the profile of that name. Raises ValueError if there is none."""
    if name not in ENGINES:
        raise ValueError(f"engine = {name}: no such profile; must be one of {', '.join(ENGINES)}")
    return ENGINES[name]
