"""The cost model: seconds of a speculative round, for the automatic draft length, the bench and the simulator."""

from dataclasses import dataclass, fields

from specjax.cost.engines import ENGINES, EngineProfile
from specjax.cost.forward import Amount, Forward


@dataclass(frozen=True)
class CostModel:
    """Seconds of a round of a policy and a drafter. See docs/cost_model.md.

    A round at draft length K is one forward of the policy over K + 1 tokens of each row. Before it, if K > 0, come K
    passes of the drafter: the first over the K + 1 tokens of the last verification, the others over one token of each
    row. A block draft computes the logits of all K tokens in the first; the others are its Markov head. At K = 0 it is
    autoregressive decoding.

    Attributes:
        policy: The policy's forward.
        first:  The drafter's first pass in a round.
        later:  Each further pass.
        engine: What the engine adds.
        block:  Whether the first pass drafts all tokens.
    """

    policy: Forward
    first: Forward = Forward()
    later: Forward = Forward()
    engine: EngineProfile = ENGINES["specjax"]
    block: bool = False

    def parts(self, rows: Amount, positions: Amount, draft_length: int) -> dict[str, Amount]:
        """Return the seconds of a round by part: the parts of `Forward.parts`, `draft` and `engine`.

        Args:
            rows:         Rows that decode together, on one device or on the devices that share their products.
            positions:    Cached positions of all rows together.
            draft_length: Tokens drafted for each row.
        """
        k, engine = draft_length, self.engine
        factor = engine.attention_factor((k + 1) * self.policy.query_group)
        seconds = self.policy.parts(rows, positions, k + 1, attention_factor=factor)
        seconds["draft"] = self.drafting(rows, positions, k)
        seconds["engine"] = engine.host + (min(k, 1) if self.block else k) * engine.draft_pass
        return seconds

    def seconds(self, rows: Amount, positions: Amount, draft_length: int) -> Amount:
        """Return the seconds of a round. See `parts`."""
        return sum(self.parts(rows, positions, draft_length).values(), 0.0)

    def constants(self) -> dict[str, float]:
        """Return the constants that are not 0, in seconds, as `policy.fixed`."""
        constants = {}
        for name in ("policy", "first", "later"):
            forward = getattr(self, name)
            times = (field.name for field in fields(forward) if field.name != "overlap")
            values = {f"{name}.{time}": getattr(forward, time) for time in times}
            constants |= {key: value for key, value in values.items() if isinstance(value, float) and value}
        return constants

    def drafting(self, rows: Amount, positions: Amount, draft_length: int) -> Amount:
        """Return the seconds of the drafter's passes of a round; 0 at draft length 0."""
        if not draft_length:
            return 0.0
        outputs = rows * draft_length if self.block else rows
        first = self.first.seconds(rows, positions, draft_length + 1, outputs=outputs)
        return first + (draft_length - 1) * self.later.seconds(rows, positions)
