"""Seconds of one forward of a network, from constants that a sheet gives or measurements do."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# A number, or an array of numbers.
Amount = int | float | np.ndarray


class ExpertCounts(NamedTuple):
    """Mixture of experts, as its cost depends on it.

    Attributes:
        experts:      Experts of a layer.
        active:       Experts of a token.
        replicas:     Groups of rows, each on devices of its own, whose tokens reach the same experts.
        independence: Of a second and later token of a row in one forward: how many tokens of other rows it counts as.
                      1 if neighbours choose their experts independently, 0 if they choose the same ones.
    """

    experts: int
    active: int
    replicas: float = 1.0
    independence: float = 1.0

    def touched(self, rows: Amount, queries: int | float) -> Amount:
        """Return how many experts of a layer some token needs, in expectation.

        Tokens choose independently: E (1 - (1 - A / E)^n) of E experts for n tokens. A verification of several tokens
        reads more experts than a round of one token does, unlike a dense network.
        """
        tokens = rows * self.replicas * (1 + self.independence * (queries - 1))
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


@dataclass(frozen=True)
class Forward:
    """Constants of a forward of B rows of Q tokens, on the device that takes longest. In seconds, none below 0.

    Attributes:
        fixed:          Whatever the size: launches, latency of collectives.
        weights:        To read the weights of all layers but the experts'.
        product:        To multiply by them, per token.
        expert:         To read one expert of each layer.
        expert_product: To multiply by the experts of a token, per token.
        cached:         To read the keys and values of a cached position.
        attended:       To attend to a cached position, per token of its row.
        head:           To read the vocabulary head.
        score:          To multiply by it, per output.
        sample:         To bring logits together and sample from them, per output.
        exchange:       To send activations between devices, per token.
        experts:        The mixture; None: only dense layers.
        query_group:    Query heads per key-value head.
        overlap:        Share of the shorter of reading and computing that the longer hides. 0: their sum counts.
    """

    fixed: float = 0.0
    weights: float = 0.0
    product: float = 0.0
    expert: float = 0.0
    expert_product: float = 0.0
    cached: float = 0.0
    attended: float = 0.0
    head: float = 0.0
    score: float = 0.0
    sample: float = 0.0
    exchange: float = 0.0
    experts: ExpertCounts | None = None
    query_group: int = 1
    overlap: float = 0.0

    def parts(
        self,
        rows: Amount,
        positions: Amount,
        queries: int | float = 1,
        outputs: Amount | None = None,
        attention_factor: float = 1.0,
    ) -> dict[str, Amount]:
        """Return the seconds of a forward by part.

        Args:
            rows:             B, rows on one device, or on the devices that share their products.
            positions:        Cached positions of all rows together: B S, or the sum of lengths that differ.
            queries:          Q, tokens of each row; on average.
            outputs:          Tokens whose logits are computed. None: all B Q.
            attention_factor: How much slower attention is.
        """
        tokens = rows * queries
        outputs = tokens if outputs is None else outputs
        seconds = {
            "launches": self.fixed,
            "weights": self._both(self.weights, self.product * tokens),
            "attention": attention_factor * self._both(self.cached * positions, self.attended * positions * queries),
            "head and sampler": self._both(self.head, self.score * outputs) + self.sample * outputs,
            "exchange": self.exchange * tokens,
        }
        if self.experts is not None:
            reading = self.expert * self.experts.touched(rows, queries)
            seconds["experts"] = self._both(reading, self.expert_product * tokens)
        return seconds

    def seconds(self, rows: Amount, positions: Amount, queries: int = 1, outputs: Amount | None = None) -> Amount:
        """Return the seconds of a forward. See `parts`."""
        return sum(self.parts(rows, positions, queries, outputs).values(), 0.0)

    def _both(self, reading: Amount, computing: Amount) -> Amount:
        return reading + computing - self.overlap * np.minimum(reading, computing)
