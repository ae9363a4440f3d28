"""On-policy distillation: the policy's divergence from a teacher, at the tokens that the policy drew itself.

The teacher runs in the update, over the same rows. Its logits, like the policy's, exist for a chunk of positions at a
time, so that a divergence over the whole vocabulary costs one more product with it and no memory.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.cache import tokens_at
from specjax.divergences import DivergenceName, divergence, reverse_kl
from specjax.log_probs import Laws, drawn_and_entropy
from specjax.options import Fraction, Options, Weight
from specjax.train.loss import LossInputs

# Number of likeliest tokens of both laws whose overlap is reported (arXiv 2604.13016).
LIKELIEST = 16
# The overlap is computed at the first token of a completion and at every 32nd after it: CPUs sort a vocabulary for it.
OVERLAP_EVERY = 32
TeacherKind = Literal["none", "network", "base", "self"]


@dataclass(frozen=True)
class TeacherConfig(Options):
    """On-policy distillation: the policy learns from a teacher at every token that it draws.

    Attributes:
        kind:       network: frozen weights of the teacher's own. base: the policy without its adapters. self: the
                    policy itself, which reads a hint in the prompt. none: no teacher.
        weight:     Weight of the divergence in the loss of a token; 0: it is only measured.
        divergence: reverse: KL(policy || teacher). forward: KL(teacher || policy). jsd: between them.
        beta:       Weight of the teacher in the mixture of jsd.
        form:       exact: over the whole vocabulary. sampled: the log-ratio of the drawn token is a cost in its
                    advantage, which keeps ratios and clips. baseline: likewise, less its mean, the exact divergence.
        rewards:    Train on rewards too. False: they are only measured.
        hint:       Text in the teacher's prompt: a worked solution, or a correct completion of the same group.
    """

    kind: TeacherKind = "none"
    weight: Weight = 1.0
    divergence: DivergenceName = "reverse"
    beta: Fraction = 0.5
    form: Literal["exact", "sampled", "baseline"] = "exact"
    rewards: bool = True
    hint: Literal["none", "solution", "group"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form != "exact" and self.divergence != "reverse":
            raise ValueError(f"divergence = {self.divergence}: must be reverse with form {self.form}")
        if self.divergence == "jsd" and not 0 < self.beta < 1:
            raise ValueError(f"beta = {self.beta}: must be above 0 and below 1 with jsd; its ends are forward, reverse")
        if self.kind == "self" and self.hint == "none":
            raise ValueError("hint = none: must be solution or group with kind self; the policy equals itself")
        if self.kind == "none" and self.hint != "none":
            raise ValueError(f"hint = {self.hint}: must be none without a teacher")

    @property
    def learns_from_rewards(self) -> bool:
        return self.rewards or self.kind == "none"

    @property
    def learns_from_teacher(self) -> bool:
        return self.kind != "none" and self.weight > 0


class Compared(NamedTuple):
    """Comparison of the policy with its teacher, by completion token [B, N]; only the first two are differentiable.

    Attributes:
        theta:      Log-prob of the token under the policy.
        divergence: Exact divergence that `TeacherConfig` names.
        entropy:    Entropy of the policy.
        reverse:    KL(policy || teacher).
        forward:    KL(teacher || policy).
        teacher:    Log-prob of the token under the teacher.
        teacher_entropy: Entropy of the teacher.
        overlap:    Share of the policy's `LIKELIEST` tokens that are among the teacher's; at every `OVERLAP_EVERY`-th
                    token, [B, M].
    """

    theta: Array
    divergence: Array
    entropy: Array
    reverse: Array
    forward: Array
    teacher: Array
    teacher_entropy: Array
    overlap: Array


def compare(
    policy: Laws,
    teacher: Laws,
    tokens: Int[Array, "B S"],
    at: Int[Array, "B N"],
    config: TeacherConfig,
    longer: Int[Array, "B"] | None = None,
) -> Compared:
    """Compare both laws at the tokens with these indices, each 1 or above.

    longer: by how many tokens the teacher's prompts are longer; None: its rows are the same.

    Ids that one vocabulary lacks are cut from the other.
    """

    def read(own: Array, others: Array, drawn: Array) -> tuple[Array, ...]:
        log_s = policy.log_probs(own)
        theta, entropy = drawn_and_entropy(log_s, drawn)
        log_s, log_t = common_laws(log_s, jax.lax.stop_gradient(teacher.log_probs(others)))
        found, teacher_entropy = drawn_and_entropy(log_t, drawn)
        exact = divergence(log_s, log_t, config.divergence, config.beta)
        both = reverse_kl(log_s, log_t), reverse_kl(log_t, log_s)
        return theta, exact, entropy, *both, found, teacher_entropy

    def read_overlap(own: Array, others: Array) -> Array:
        return overlap(*common_laws(policy.log_probs(own), teacher.log_probs(others)))

    before = jnp.maximum(at - 1, 0)
    others = tokens_at(teacher.source, before if longer is None else before + longer[:, None])
    own = tokens_at(policy.source, before)
    sparse = jax.lax.stop_gradient((sparsely(own), sparsely(others)))
    overlaps = policy.by_position(read_overlap, *sparse, networks=2)
    read_tokens = policy.by_position(read, own, others, tokens_at(tokens, at), networks=2)
    return Compared._make((*read_tokens, overlaps))


def sparsely(x: Shaped[Array, "B N *rest"]) -> Shaped[Array, "B M *rest"]:
    """Return the tokens at which the overlap is computed."""
    return x[:, ::OVERLAP_EVERY]


def common_laws(log_s: Float[Array, "... V"], log_t: Float[Array, "... W"]) -> tuple[Array, Array]:
    """Return both laws over the ids that both vocabularies have; unchanged if they have the same number."""
    size = min(log_s.shape[-1], log_t.shape[-1])
    if log_s.shape[-1] == log_t.shape[-1]:
        return log_s, log_t
    return jax.nn.log_softmax(log_s[..., :size]), jax.nn.log_softmax(log_t[..., :size])


def overlap(log_s: Float[Array, "... V"], log_t: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Return the share of the `LIKELIEST` tokens of one law that are among those of the other."""
    count = min(LIKELIEST, log_s.shape[-1])
    _, likeliest = jax.lax.top_k(log_s, count)
    least = jax.lax.top_k(log_t, count)[0][..., -1:]
    return jnp.mean(jnp.take_along_axis(log_t, likeliest, axis=-1) >= least, axis=-1, dtype=jnp.float32)


def with_teacher_cost(inputs: LossInputs, compared: Compared | None, config: TeacherConfig) -> LossInputs:
    """Return the inputs of the policy's loss with the advantages of a sampled form: they have no gradient.

    Their mean over drawn tokens is the exact gradient; a baseline, which no drawn token changes, leaves it the same
    with less variance (vOPD, arXiv 2605.07865).
    """
    if compared is None or config.form == "exact" or not config.learns_from_teacher:
        return inputs
    cost = compared.theta - compared.teacher
    if config.form == "baseline":
        cost -= compared.divergence
    cost = jax.lax.stop_gradient(jnp.where(inputs.mask, cost, 0.0))
    return replace(inputs, advantage=inputs.advantage - config.weight * cost)


def with_divergence(
    loss: Float[Array, "B N"], mask: Bool[Array, "B N"], compared: Compared | None, config: TeacherConfig
) -> Float[Array, "B N"]:
    """Return the loss of each token with the weighted divergence of the exact form."""
    if compared is None or config.form != "exact" or not config.learns_from_teacher:
        return loss
    return loss + config.weight * jnp.where(mask, compared.divergence, 0.0)


class TeacherSums(NamedTuple):
    """Sums over the trained tokens of a microbatch.

    Attributes:
        divergence, reverse, forward: Of the policy and the teacher.
        entropy:           Of the teacher.
        overlap, overlaps: The overlap, and the number of tokens at which it was computed.
        stop_gap, stops:   Log-prob under the teacher less the policy's, of stop tokens, and their number.
    """

    divergence: Array
    reverse: Array
    forward: Array
    entropy: Array
    overlap: Array
    overlaps: Array
    stop_gap: Array
    stops: Array


def sum_teacher(compared: Compared, mask: Bool[Array, "B N"], stops: Bool[Array, "B N"]) -> TeacherSums:
    """Sum what a microbatch reports of its teacher. mask: trained tokens. stops: tokens that end a completion."""

    def total(x: Array, where: Array = mask) -> Array:
        return jnp.sum(jnp.where(where, x, 0.0))

    stops &= mask
    return TeacherSums(
        divergence=total(compared.divergence),
        reverse=total(compared.reverse),
        forward=total(compared.forward),
        entropy=total(compared.teacher_entropy),
        overlap=total(compared.overlap, sparsely(mask)),
        overlaps=jnp.sum(sparsely(mask), dtype=jnp.float32),
        stop_gap=total(compared.teacher - compared.theta, stops),
        stops=jnp.sum(stops, dtype=jnp.float32),
    )
