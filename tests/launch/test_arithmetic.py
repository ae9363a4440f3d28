import pytest

from launch.cli.errors import ConfigError
from launch.data.arithmetic import arithmetic, exact_answer


def test_problems_are_right():
    problems = arithmetic(seed=0, count=200, min_terms=2, max_terms=4, max_value=12)
    for problem in problems:
        terms = [int(term) for term in problem.prompt.removesuffix("=").split("+")]
        assert 2 <= len(terms) <= 4 and all(1 <= term <= 12 for term in terms)
        assert problem.answer == str(sum(terms))
        assert problem.solution is not None
        *steps, last = problem.solution.split("\n")
        assert last == f"#{sum(terms)}"
        assert len(steps) == len(terms) - 1
        for i, step in enumerate(steps):
            assert step == f"{sum(terms[: i + 1])}+{terms[i + 1]}={sum(terms[: i + 2])}"
        assert exact_answer(problem.solution, problem.answer) == 1.0
    assert {problem.prompt.count("+") for problem in problems} == {1, 2, 3}


def test_example():
    (problem,) = arithmetic(seed=0, count=1, min_terms=3, max_terms=3, max_value=1)
    assert (problem.prompt, problem.solution, problem.answer) == ("1+1+1=", "1+1=2\n2+1=3\n#3", "3")


def test_seed_decides():
    def prompts(seed: int) -> list[str]:
        return [problem.prompt for problem in arithmetic(seed, 50, 2, 4, 20)]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_all_distinct_sums_can_be_had():
    problems = arithmetic(seed=0, count=9 + 27, min_terms=2, max_terms=3, max_value=3)
    assert len({problem.prompt for problem in problems}) == 36


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            dict(count=37, min_terms=2, max_terms=3, max_value=3),
            "data.arithmetic.problems = 37: must be between 1 and 36",
        ),
        (dict(count=0, min_terms=2, max_terms=3, max_value=3), "data.arithmetic.problems = 0: "),
        (dict(count=1, min_terms=1, max_terms=3, max_value=3), "data.arithmetic.min_terms = 1: must be at least 2"),
        (
            dict(count=1, min_terms=3, max_terms=2, max_value=3),
            "data.arithmetic.min_terms = 3: must be at least 2, and at most max_terms = 2",
        ),
        (dict(count=1, min_terms=2, max_terms=2, max_value=0), "data.arithmetic.max_value = 0: "),
    ],
)
def test_bad_bounds_are_config_errors(bounds: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        arithmetic(seed=0, **bounds)


@pytest.mark.parametrize(
    ("completion", "value"),
    [("#21", 1.0), ("#3 no, # 21\n", 1.0), ("#21 #3", 0.0), ("21", 0.0), ("#210", 0.0), ("", 0.0)],
)
def test_exact_answer_reads_what_follows_the_last_marker(completion: str, value: float):
    assert exact_answer(completion, "21") == value
