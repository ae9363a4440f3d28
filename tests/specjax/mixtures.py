"""A small policy with a mixture of experts, and what tests compute with it on several meshes."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from models.config import ExpertsConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import Init, abstract_params, param_shardings
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.generate import make_generate
from specjax.train.config import TrainConfig
from specjax.train.loss import LossConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params, PyTree, Rollout
from tests.specjax.training import CONFIG, DECODER, HEAD, count_fives, last_gradients, make_prompts

EXPERTS = ExpertsConfig(num_experts=8, active=2, intermediate_size=16, layers=(1,))
DECODER_MOE = replace(DECODER, experts=EXPERTS)
POLICY = make_policy(DECODER_MOE)
EAGLE3, MTP = make_eagle3(HEAD, POLICY), make_mtp(mtp_config(DECODER_MOE, "mimo"), POLICY)
COUPLED = replace(CONFIG.rollout, verifier="coupled")
ONE, EIGHT = MeshConfig(), MeshConfig(data=2, expert=2, tensor=2)
DRAFTS: dict[str, tuple[Drafter, Init | None]] = {
    "none": (NoDrafter(), None),
    "eagle3": (EAGLE3, partial(init_eagle3, HEAD)),
    "mtp": (MTP, partial(init_mtp, mtp_config(DECODER_MOE, "mimo"))),
}


def filled(init: Init | None, mesh: Mesh, scale: float = 0.3) -> PyTree:
    """Return parameters with the same random numbers on every mesh."""
    rng = np.random.default_rng(0)

    def fill(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return ((1.0 if x.ndim == 1 else 0.0) + scale * rng.standard_normal(x.shape)).astype(x.dtype)

    return (
        {} if init is None else jax.device_put(jax.tree.map(fill, abstract_params(init)), param_shardings(init, mesh))
    )


def params_on(config: MeshConfig, draft: str = "eagle3") -> Params:
    mesh = make_mesh(config)
    return Params(filled(partial(init_decoder, DECODER_MOE), mesh), filled(DRAFTS[draft][1], mesh))


def rollout_on(config: MeshConfig, draft: str, **options) -> Rollout:
    rollout = replace(COUPLED, **({"draft_length": 0} if draft == "none" else {}), **options)
    generate = make_generate(POLICY, DRAFTS[draft][0], rollout, make_mesh(config))
    return generate(params_on(config, draft), make_prompts(), seed_step(7, 0))


LOSS = LossConfig(router_aux_loss_coef=0.5, routing="replay")
TRAIN = replace(CONFIG, rollout=COUPLED, loss=LOSS, microbatches=2)


def step_on(config: MeshConfig, train: TrainConfig) -> tuple[Params, Rollout, dict[str, jax.Array]]:
    mesh = make_mesh(config)
    step = make_train_step(POLICY, EAGLE3, count_fives, train, mesh)
    state, rollout, metrics = step(init_train_state(params_on(config), train, mesh), make_prompts())
    return last_gradients(state), rollout, metrics
