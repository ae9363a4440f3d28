"""Attention with all its scores, and programs of training whose arrays must not grow with the square of a row."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.params import abstract_params
from specjax.drafters.base import Anchors
from specjax.kernels import plain
from specjax.log_probs import teacher_forced
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program
from specjax.train.batch import Sequences, TrainBatch
from specjax.train.draft.loss import draft_gradient
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import Params, PyTree


def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    """Attend from q [B, N, heads, H] to k and v [B, S, G, H] by a mask [N, S]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqnh,bsnh->bnqs", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.asarray(mask)[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqs,bsnh->bqnh", weights, v)


def training_program(
    decoder: DecoderConfig, head: Eagle3Config, mesh: Mesh, length: int, rows: int = 1
) -> jax.stages.Lowered:
    """Lower the gradients of an update, at drawn anchors, and of a distillation at all tokens. rows: of each device."""
    policy = make_policy(decoder, remat="full")
    drafter = make_eagle3(head, policy, unroll=2)
    context = LossContext(policy, drafter, SamplingLaw(), logit_chunk=64, anchors=8)
    inits = partial(init_decoder, decoder), partial(init_eagle3, head)
    over_rows = NamedSharding(mesh, P(("data", "fsdp")))

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        count = rows * mesh.shape["data"] * mesh.shape["fsdp"]
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=over_rows)

    tokens, numbers = array("int32", length), array("float32", length)
    batch = TrainBatch(
        tokens=tokens,
        completion=array("bool", length),
        reward=array("float32"),
        counted=array("bool"),
        mu=numbers,
        advantage=numbers,
        keys=array("uint32", 2),
    )

    def run(params: Params, batch: TrainBatch, every: Anchors) -> PyTree:
        gradients, _ = accumulate(context, params, batch)
        sequences = Sequences(batch.tokens, batch.completion)
        output = jax.lax.stop_gradient(teacher_forced(policy, params.policy, batch.tokens, context.logit_chunk))
        whole = replace(context, anchors=0)
        return gradients, draft_gradient(whole, params, jnp.float32(1), sequences, output, every)[0]

    params = Params(*(abstract_params(init, mesh) for init in inits))
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(params, batch, Anchors(tokens, numbers))


def squares(text: str, length: int) -> set[tuple[int, ...]]:
    """Return the shapes of arrays, in a compiled program, that have two axes of about the length of a row."""
    lines = [line for each in Program(text).computations.values() for line in each]
    shapes = {shape for line in lines for shape in line.arrays}
    return {shape for shape in shapes if sum(length - 4 <= size <= length + plain.QUERIES for size in shape) > 1}
