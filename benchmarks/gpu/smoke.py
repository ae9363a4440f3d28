"""Check on this device what must hold on any: tokens, distributions and gradients. Exits with 1 if a check fails.

Run from the repository's root: python -m benchmarks.gpu.smoke

Required, with float32 products of full precision (jax_default_matmul_precision = highest):
- `coupled` completions are the same tokens at every draft length
- completions follow their exact distribution, by a chi-square test of each verifier
- gradients of both losses equal the CPU's, where another device computes
- products of experts equal the products of single rows
The same at the precision that jax chooses, on GPUs TF32, and tokens in bfloat16 are measured, but required of nothing:
a draw that two tokens nearly tie for may fall to the other one.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.bench.models import BenchNetworks, random_networks, random_prompts
from benchmarks.bench.presets import PRESETS, Preset
from benchmarks.bench.report import BenchSection, Results, Row
from models.config import Dtype
from specjax import kernels
from specjax.parallel.mesh import AXES
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.testing.drafters import PolicyDrafter
from specjax.testing.lossless import assert_lossless
from specjax.testing.policy import tiny_policy
from specjax.testing.same import assert_same_rollout
from specjax.train.batch import TrainBatch
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import Params
from specjax.verify import VerifierName

ROWS, PROMPT, NEW = 16, 32, 96
# Largest ||gradient - CPU's|| / ||CPU's||. Sums in another order differ by less than 1e-5, TF32 by about 3e-4.
TOLERANCE = 1e-4
# The same for products in bfloat16, whose results are rounded to 8 bits.
BFLOAT16_TOLERANCE = 1e-2
# Tolerance of log-probs where only tokens are compared.
ANY = 1e9
# Outcome of a required check.
FAILS = "FAILS"
# Completions drawn by one program.
AT_ONCE = 2**14


def same_tokens(networks: BenchNetworks, tolerance: float, k: int) -> str:
    """Compare `coupled` completions at draft length k with those without a draft, log-probs within the tolerance."""
    # Scaled by -1, a draft from the policy is accepted now and then: rounds end everywhere.
    drafter, params = PolicyDrafter(networks.policy), Params(networks.params.policy, {"scale": jnp.float32(-1)})
    config = RolloutConfig(group_size=1, max_new_tokens=NEW, draft_length=k, verifier="coupled")
    with jax.set_mesh(networks.mesh):
        rollout = assert_same_rollout(
            networks.policy, drafter, params, random_prompts(networks, ROWS, PROMPT), config, tolerance=tolerance
        )
    assert rollout.accepted is not None and rollout.drafted is not None
    return f"{ROWS * NEW} tokens; {float(rollout.accepted.sum() / rollout.drafted.sum()):.0%} of drafted ones accepted"


def chi_square(verifier: VerifierName, draws: int) -> str:
    """Test completions of a tiny policy, drafted by itself with a flatter law, against their exact distribution."""
    policy, weights = tiny_policy()
    config = RolloutConfig(group_size=AT_ONCE, max_new_tokens=3, draft_length=2, verifier=verifier, stop_tokens=(4,))
    params = Params(weights, {"scale": jnp.float32(0.4)})
    # A test of as much power, whatever the number of draws.
    distance = round(0.02 * (200_000 / draws) ** 0.5, 3)
    return str(
        assert_lossless(
            policy, PolicyDrafter(policy), params, config, prompt=(1, 2), draws=draws, total_variation=distance
        )
    )


def products_of_experts() -> str:
    """Compare grouped products in bfloat16, and their gradients, with float32 products of single rows."""
    sizes = jnp.array([300, 0, 1, 511, 0, 100], jnp.int32)
    keys, last = jax.random.split(jax.random.key(0), 3), int(sizes.sum())
    shapes = (1024, 256), (len(sizes), 256, 384), (1024, 384)
    x, weights, slope = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    x, weights = x.astype("bfloat16"), weights.astype("bfloat16")

    def of_rows(x: jax.Array, weights: jax.Array) -> jax.Array:
        group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=last)
        product = jnp.einsum("md,mdf->mf", x[:last].astype("float32"), weights.astype("float32")[group])
        return jnp.pad(product, ((0, len(x) - last), (0, 0)))

    def all_of(product: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(product, x, weights)
        return y, *back(slope.astype(y.dtype))

    here, reference = jax.jit(lambda: (all_of(lambda x, w: kernels.grouped(x, w, sizes)), all_of(of_rows)))()
    gap = max(_gap(one.astype("float32"), other.astype("float32")) for one, other in zip(here, reference, strict=True))
    assert gap <= BFLOAT16_TOLERANCE, f"{gap:.1e}, must be at most {BFLOAT16_TOLERANCE}"
    return f"{gap:.1e}"


def gradients(networks: BenchNetworks) -> str:
    """Compare the gradients of both losses with the CPU's."""
    prompts = random_prompts(networks, ROWS, PROMPT + NEW)
    mask = jnp.broadcast_to(jnp.arange(PROMPT + NEW)[None] >= PROMPT, prompts.tokens.shape)
    advantage = jax.random.normal(jax.random.key(1), mask.shape)
    batch = TrainBatch(prompts.tokens, mask, reward=advantage[:, 0], counted=mask.any(axis=1), advantage=advantage)
    context = LossContext(networks.policy, networks.drafter, SamplingLaw())

    def on(platform: str | None) -> Params:
        device = jax.devices(platform)[0]
        mesh = Mesh(np.reshape(device, (1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        with jax.set_mesh(mesh):
            run = jax.jit(lambda params, batch: accumulate(context, params, batch)[0])
            return jax.device_get(run(*jax.device_put((networks.trained, batch), device)))

    here, cpu = on(None), on("cpu")
    gaps = {name: _gap(getattr(here, name), getattr(cpu, name)) for name in ("policy", "draft")}
    text = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    assert max(gaps.values()) <= TOLERANCE, f"{text}, must be at most {TOLERANCE}"
    return text


def _gap(tree: object, reference: object) -> float:
    """Return ||tree - reference|| / ||reference||, in float64."""
    one, other = (np.concatenate([x.ravel() for x in jax.tree.leaves(each)]) for each in (tree, reference))
    return float(np.linalg.norm(np.float64(one) - other) / np.linalg.norm(np.float64(other)))


def checks(preset: Preset, lengths: list[int], draws: int) -> dict[tuple[str, str, bool], Callable[[], str]]:
    """Return the checks by (name, precision, required), those that compile soonest first."""

    @cache
    def networks(dtype: Dtype) -> BenchNetworks:
        return random_networks(replace(preset, decoder=replace(preset.decoder, dtype=dtype)))

    def tokens(dtype: Dtype, tolerance: float, k: int) -> Callable[[], str]:
        return lambda: same_tokens(networks(dtype), tolerance, k)

    def compared() -> str:
        return gradients(networks("float32"))

    checks: dict[tuple[str, str, bool], Callable[[], str]] = {}
    for verifier in get_args(VerifierName):
        checks[f"chi-square, {verifier}", "highest", True] = partial(chi_square, verifier, draws)
    checks["products of experts", "highest", True] = products_of_experts
    for k in lengths:
        checks[f"same tokens at draft length {k}", "highest", True] = tokens("float32", 1e-3, k)
    checks["gradients against the CPU's", "highest", True] = compared
    if jax.default_backend() != "cpu":
        # On CPUs the default is full precision.
        checks["gradients against the CPU's", "default", False] = compared
        checks[f"same tokens at draft length {lengths[-1]}", "default", False] = tokens("float32", ANY, lengths[-1])
    checks[f"same tokens at draft length {lengths[-1]}", "bfloat16", False] = tokens("bfloat16", ANY, lengths[-1])
    return checks


def measure(check: Callable[[], str], precision: str) -> tuple[bool, str]:
    """Return whether the check passes, and what it found or why it failed. No exception of a check ends the others."""
    try:
        with jax.default_matmul_precision("highest" if precision == "highest" else None):
            return True, check()
    except Exception as error:
        return False, " ".join((str(error) or type(error).__name__).split())[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="25m", help="preset of benchmarks.bench, in float32"
    )
    parser.add_argument("--draws", type=int, default=200_000, help="completions in each chi-square test")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3, 7], help="draft lengths to compare tokens at")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    results = Results("benchmarks.gpu.smoke", options.preset, options.json)
    results.follow("smoke", outcomes(PRESETS[options.preset], options.lengths, options.draws))
    return int(any(row["outcome"] == FAILS for row in results.sections["smoke"].rows))


def outcomes(preset: Preset, lengths: list[int], draws: int) -> Iterator[BenchSection]:
    """Yield the outcomes so far after each check."""
    rows, notes = list[Row](), list[str]()
    for (name, precision, required), check in checks(preset, lengths, draws).items():
        passes, detail = measure(check, precision)
        outcome = "passes" if passes else FAILS if required else "differs"
        rows.append({"check": name, "precision": precision, "outcome": outcome})
        notes.append(f"{name}, {precision}: {detail}")
        print(f"{outcome}: {notes[-1]}", file=sys.stderr, flush=True)
        yield BenchSection("checks of this device", rows, notes)


if __name__ == "__main__":
    raise SystemExit(main())
