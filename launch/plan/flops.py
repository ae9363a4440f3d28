"""Floating-point operations of matrix products, counted in a traced function."""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from specjax.kernels import cudnn

# Products of each query with each key that a call of cuDNN computes: scores and outputs, and for the gradients scores
# again and one for each of queries, keys, values and weights.
ATTENTION = {cudnn.FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}
# jax's number of the layout [B, N, T, H]; the other is [B, T, N, H].
BY_HEAD = 1
# jax's numbers of the masks by which a token sees only earlier ones, half of a row on average.
CAUSAL = (2, 3)


class Flops(NamedTuple):
    """Operations over all devices: the ones that run a known number of times, and one turn of the largest loop.

    Loops whose number of turns depends on data count; of nested ones, the inner one.
    `launch.plan.traffic.Collectives` divides a program in the same way.
    """

    fixed: float
    turn: float


def flops(jaxpr: Any) -> Flops:
    """Count 2 m n k for each product of [m, k] and [k, n] in a jaxpr and in all functions that it calls.

    A grouped product counts as if every row belonged to a group, and attention as if every cache were full.
    """
    fixed = turn = 0.0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, [flops(each) for each in _called(eqn.params)]
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs_shape = eqn.invars[0].aval.shape
            fixed += 2.0 * prod(eqn.outvars[0].aval.shape) * prod(lhs_shape[axis] for axis in contracted)
        elif name == "ragged_dot_general":
            fixed += 2.0 * prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]
        elif name in ATTENTION:
            fixed += ATTENTION[name] * _of_attention(eqn)
        elif name == "cond":
            branch = max(inner, key=sum)
            fixed, turn = fixed + branch.fixed, max(turn, branch.turn)
        elif name == "while":
            once, largest = sum(part.fixed for part in inner), max(part.turn for part in inner)
            if _runs_once(eqn.params):
                fixed, turn = fixed + once, max(turn, largest)
            else:
                turn = max(turn, largest or once)
        elif inner:
            times = _times(name, eqn.params)
            fixed += times * sum(part.fixed for part in inner)
            scale = times if name == "shard_map" else 1
            turn = max(turn, *(scale * part.turn for part in inner))
    return Flops(fixed, turn)


def _of_attention(eqn: Any) -> float:
    """Return 2 m n k of the product of queries and keys in a call of cuDNN."""
    query, key = (x.aval.shape for x in eqn.invars[:2])
    keys_axis = 2 if eqn.params["layout"] == BY_HEAD else 1
    keys, mask = key[keys_axis], eqn.params["mask_type"]
    window = eqn.params["sliding_window_length"]
    if window:
        keys = min(keys, window)
    elif getattr(mask, "value", mask) in CAUSAL:
        keys /= 2
    return 2.0 * prod(query) * keys


def _times(name: str, params: dict[str, Any]) -> int:
    """Return how often a call runs: the turns of a scan, or the shards of a `shard_map`."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _runs_once(params: dict[str, Any]) -> bool:
    """Return whether a loop is a branch of `kernels.gpu.run_if`: its condition reads a flag and computes nothing."""
    return not params["cond_jaxpr"].jaxpr.eqns


def _called(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each
