"""Variance of the sampled gradients of distillation, by enumeration over the vocabulary.

At one position, with random laws of policy and teacher: the variance of the gradient by the policy's logits that one
drawn token gives, over the squared norm of the exact gradient. It is about how many tokens a sampled form needs to know
what the exact form, which has no variance, knows from the prefix.

Run from the repository's root: python -m benchmarks.sampled_gradients
"""

import argparse

import numpy as np

from launch.timing import format_provenance


def laws(rng: np.random.Generator, vocab: int, spread: float, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs of a policy, with normal logits of this spread, and of a teacher at this distance."""
    own = spread * rng.standard_normal(vocab)
    both = own, own + distance * rng.standard_normal(vocab)
    first, second = (z - np.log(np.exp(z - z.max()).sum()) - z.max() for z in both)
    return first, second


def variances(log_s: np.ndarray, log_t: np.ndarray) -> tuple[float, float, float]:
    """Return KL(s || t), and both variances over the exact gradient's squared norm: without and with the baseline.

    A token y with cost c gives the gradient c (e_y - s), whose squared norm is c^2 (1 - 2 s_y + |s|^2).
    """
    s, log_ratio = np.exp(log_s), log_s - log_t
    kl = float(s @ log_ratio)
    squared = float(np.sum((s * (log_ratio - kl)) ** 2))
    norms = 1 - 2 * s + s @ s
    plain, baseline = (float(s @ (cost**2 * norms)) - squared for cost in (log_ratio, log_ratio - kl))
    return kl, plain / squared, baseline / squared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32_768, help="vocabulary size")
    parser.add_argument("--spread", type=float, nargs="+", default=[2.0, 4.0], help="of the policy's logits")
    parser.add_argument("--distance", type=float, nargs="+", default=[2.0, 1.0, 0.3, 0.1], help="of the teacher's")
    parser.add_argument("--laws", type=int, default=200, help="random laws; medians are over them")
    options = parser.parse_args()
    print(format_provenance("benchmarks.sampled_gradients"))
    print("medians of the variance of one token's gradient over the squared norm of the exact one")
    print("spread  distance  KL(s || t)   sampled  with baseline  sampled / baseline")
    for spread in options.spread:
        for distance in options.distance:
            rng = np.random.default_rng(0)
            drawn = [variances(*laws(rng, options.vocab, spread, distance)) for _ in range(options.laws)]
            kl, plain, baseline = np.median(drawn, axis=0)
            ratio = np.median([a / b for _, a, b in drawn])
            print(f"{spread:6}  {distance:8}  {kl:10.4f}  {plain:8.1f}  {baseline:13.1f}  {ratio:18.2f}")


if __name__ == "__main__":
    main()
