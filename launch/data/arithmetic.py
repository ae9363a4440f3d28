"""Built-in task: sums, with worked steps as solutions.

prompt    7+5+9=
solution  7+5=12
          12+9=21
          #21
answer    21
"""

import random

from launch.data.problems import Problem
from launch.errors import ConfigError

ALPHABET = "0123456789+=#\n"


def arithmetic(seed: int, count: int, min_terms: int, max_terms: int, max_value: int) -> list[Problem]:
    """Return `count` distinct sums in random order. Their terms lie in 1 .. max_value.

    The number of terms is drawn uniformly from min_terms .. max_terms; duplicates are drawn again. Deterministic: the
    same arguments give the same sums. Raises ConfigError if the bounds are invalid or allow fewer distinct sums.
    """
    if min_terms > max_terms:
        raise ConfigError(f"data.arithmetic.min_terms = {min_terms}: must be at most max_terms = {max_terms}")
    distinct = sum(max_value**terms for terms in range(min_terms, max_terms + 1))
    if count > distinct:
        raise ConfigError(
            f"data.arithmetic.problems = {count}: must be at most {distinct}, the distinct sums within the bounds"
        )
    rng = random.Random(seed)
    sums: dict[tuple[int, ...], None] = {}  # an ordered set
    while len(sums) < count:
        num_terms = rng.randint(min_terms, max_terms)
        sums[tuple(rng.randint(1, max_value) for _ in range(num_terms))] = None
    return [_problem(terms) for terms in sums]


def _problem(terms: tuple[int, ...]) -> Problem:
    """Return the problem of adding `terms`, with one step per line as its solution."""
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return Problem(prompt="+".join(map(str, terms)) + "=", answer=str(total), solution="\n".join([*steps, f"#{total}"]))
