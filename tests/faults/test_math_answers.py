"""Rows 69 and 74: what the scorer `math` takes for the same value, and answers that it cannot find."""

import pytest

from configs.schema import RewardConfig
from launch.data.problems import Problem
from launch.rewards.boxes import boxed, stated_answers
from launch.rewards.reward_fn import unscorable_answers
from launch.rewards.scorers import load_scorer
from launch.rewards.workers import RewardPool
from tests.faults.test_tokens import tagged  # noqa: F401, a fixture


def test_row_69_answers_whose_number_alone_is_not_their_value_are_counted() -> None:
    pytest.importorskip("math_verify")
    bad = [
        "34 dollars",
        "2nd",
        "April 4",
        r"\text{34 dollars}",
        "about 5",
        "€34",
        "12 L",
        "34 Rs",
        "5 m/s",
        "34¢",
        "3/4 cup",
    ]
    good = ["34", "34.", "34,", "10 km", r"34 \text{ dollars}", "2516_8", "2025-01-02", r"\frac{1}{2}", "x", "3 or 4"]
    good += ["2 hours 30 minutes", "January 2, 2025", r"\sqrt{2} meters", "2x", "x = 3"]
    good += [
        r"\log_2 8",
        "3 sin x",
        "x^2",
        "2x + 1",
        "-3",
        "5!",
        r"50\%",
        r"\$34",
        r"90^\circ",
        r"\frac{\pi}{2}",
        "(1,2)",
    ]
    with RewardPool(RewardConfig("math", workers=1, time_limit_s=20)) as pool:
        problems = [Problem(prompt="", answer=answer) for answer in ["never{", *bad, *good]]
        assert unscorable_answers(pool, problems) == (["never{"], bad)
    for answer, number in {"34 °C": "34", "34 cm^2": "34", "3/4 cup": "3/4", r"2^{10} bytes": "2^{10}"}.items():
        assert stated_answers(answer) == [boxed(answer), boxed(number)]
    scorer = load_scorer("math")
    for answer, completion in (("34.", "34"), ("34,", "34"), ("34", "34."), ("1,234.", "1234")):
        assert scorer.score(rf"\boxed{{{completion}}}", answer) == 1.0


# Expected answer, completions that give it, and completions that do not.
VALUES = {
    "2516_8": (["2516_8", "2516_{8}", "(2516)_8", "2516₈", r"2516 \text{ (base 8)}"], ["2516_7", "2516", "1358"]),
    "2516": (["2516", "2516_{10}", "2,516", r"2\,516"], ["2516_7", "2516₇"]),
    "1AF_{16}": (["1af_{16}"], ["1AF_{15}", "1AF"]),
    r"2_{\text{eight}}": ([r"2_{\text{eight}}"], [r"2_{\text{seven}}"]),
    "2025-01-02": (["2025-01-02", "2025-1-2", "2025–01–02"], ["2022", "2025", "2025-01-03"]),
    "2022": (["2022"], ["2025-01-02", "2025-3"]),
    "01/02/2025": (["01/02/2025", "1/2/2025"], [r"\frac{1}{4050}", "2/1/2025"]),
    "1.2.3": (["1.2.3"], ["0.36", "1.2", "1.2.4"]),
    "10:05": (["10:05"], ["2", "10", "10:50"]),
    "3:4": (["3:4", r"\frac{3}{4}", "6:08", "30:40"], ["3", "4:3"]),
    "1:2": (["5:10", "1/2"], ["10:05", "2"]),
    "3/40": (["3:40"], ["3:04", "40"]),
    "3-5": (["3-5", "3 – 5"], ["-2", "3", "4"]),
    "silent": (["Silent", r"\text{silent}"], ["listen", r"\text{listen}", r"\text{l i s t e n}"]),
    "BCD": (["BCD", r"\mathrm{BCD}", "B, C, D".replace(", ", " ")], ["BDC", "CBD", r"\text{B D C}"]),
    "ab": (["ab"], ["ba"]),
    "well-known": (["well-known"], ["known-well"]),
    "act, dog": (["dog, act", "act, dog"], ["cat, dog", "act, god"]),
    "A1": (["A1", r"\text{A1}"], ["1A", "1"]),
    "ab + 1": (["1 + ba", "ab+1"], ["ab"]),
    "0x1F": (["0x1f"], ["0x1E", "0", "1"]),
    "0b101": (["0b101"], ["0b100", "0", "101"]),
    "45": (["45", "45.0"], ["4 5", r"\text{4} 5", "(4)(5)", "5 4"]),
    "123": (["123"], ["1 2 3", "12 3"]),
    "12": (["12", "3 \\cdot 4"], [r"\text{1} 2", "1 2", "0x12"]),
    "3": ([r"\log_2 8", r"\log_{2} 8", "3.0"], [r"\log_2 4", "2 hours 3"]),
    "2x_1": (["x_1 2", "2x_1", r"2 \cdot x_1"], ["2x_2", "21"]),
    "3 + 2 C_1": (["2C_1 + 3", "3+2C_1"], ["2C_2 + 3"]),
    r"2\text{ hours }40\text{ minutes}": (["2 hours 40 minutes"], [r"2\text{ hours }30\text{ minutes}", "240"]),
    "5h 30m": (["5h30m", "5 h 30 m"], ["3h 50m"]),
    "2 x 3": (["2x3"], ["3x2"]),
    r"5 \text{ m}^2": (
        [r"5 \text{ m}^{2}", r"5 \text{ square metres}", "5", r"5 \text{ m}²"],
        [r"5 \text{ m}", "5 m^3"],
    ),
    r"9 \text{ m/s}": ([r"9\text{m/s}", "9"], [r"9 \text{ m/s}^2"]),
    "5": (
        ["5", "x=5", r"\approx 5", r"\boxed{5}"],
        ["4 (or 5)", "4 或 5", "4 or maybe 5", r"4 \text{ (or 5)}", "4 or 5"],
    ),
    "4": (
        ["4", r"\text{Area} = 4"],
        [r"\neq 4", r"x \neq 4", "> 4", "≥ 4", r"\leq 4", r"4 \text{ or more}", r"\text{at least } 4", "not 4"],
    ),
    "1 1/2": (["1.5", r"1\frac{1}{2}"], ["1", "2"]),
    "7": (["7", "3+4"], ["3 4", r"3 \lor 7", r"3 \to 7", "3, 7", "3 or 7", "3 & 7"]),
    "(1,2)": (["(1,2)", "1,2", r"\left(1, 2\right)"], ["2,1", "(2,1)", r"\{1,2\}", "[1,2]", "1"]),
    r"\{1,2\}": ([r"\{2,1\}", "2, 1", "1 and 2"], ["(1,2)", "1"]),
    "1,2": (["2,1", r"\{1,2\}", "1 or 2"], ["(2,1)", "1", "12"]),
    "10 km": (["10", "10 km", r"10 \text{ kilometers}"], ["10 m", r"10 \text{ miles}"]),
    r"\$34": (["34", r"34 \text{ dollars}"], [r"34 \text{ cents}", "€34"]),
    "5 minutes": ([r"5 \text{ min}", "5"], [r"5 \text{ hours}"]),
    "50%": ([r"50\%", "0.5"], ["500", "5%"]),
    "90^\\circ": (["90°", "90"], ["9"]),
    r"\frac{1}{2}": (["0.5", r"\frac 1 2", "2/4"], ["1", "2", "12"]),
    r"2\sqrt{3}": ([r"\sqrt{12}"], ["2"]),
    "x=3": (["3", "x=3"], ["y=3", "x=4"]),
}


@pytest.mark.parametrize("answer", VALUES)
def test_row_74_only_the_same_value_is_equal(answer: str) -> None:
    pytest.importorskip("math_verify")
    scorer, (right, wrong) = load_scorer("math"), VALUES[answer]
    scored = {text: scorer.score(rf"\boxed{{{text}}}", answer) for text in (*right, *wrong)}
    assert scored == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *((text, None) for text in ("The answer is 4 or 5 or 6", "Either 4 or 5", "4, 5", "The answer is $4$ or 5.")),
        *((text, None) for text in ("The answer is x = 4 or x = 5.", "It is between 4 and 6", "4 to 6", "(4, 5)")),
        *(
            (text, "4")
            for text in ("The answer is 4.", "It's 4 or 5. So the answer is 4.", "answer 4 (not 5)", "**4**")
        ),
        *((text, "4") for text in ("Answer: 4. Check: 4+5=9", "The answer is 4. I am 90% sure.", "4 km")),
        *(("The answer is 2516_8.", "2516_8"), ("On 2025-01-02.", "2025-01-02"), ("The answer is 50%.", "0.5")),
        *((text, None) for text in ("It is 4, or possibly even 5", "Either 4, 5, maybe 6.", "The answer is not 4.")),
        *((text, None) for text in ("It isn't 4.", "It is less than $4$", "It is at least 4", "It can't be 4")),
        *(
            (text, None)
            for text in ("It is not equal to 4.", "4 or, less likely, 5", "4? or 5?", "perhaps 4; perhaps 5")
        ),
        *((text, text) for text in ("4π", "4")),
        *(
            (rf"\boxed{{4}} {between} $\boxed{{5}}$", None)
            for between in ("or", r", \text{ or }", "or maybe", "$ or $", "/", "或")
        ),
        *((text, None) for text in (r"\boxed{6} or \boxed{4} or \boxed{5}", "4 or 4.5", "4, not 5")),
        *(("The answer is 2x", "2x"), ("It is 5e3", "5e3"), ("4km", "4"), (r"$\neq 4$", r"\neq 4")),
        *(("The answer is 12 (or 12.0)", "12"), ("It is 0.5 or 1/2.", "1/2"), (r"\boxed{5} or \boxed{5.0}", "5")),
        *((r"\boxed{4}. Or rather: \boxed{5}", "5"), (r"Not \boxed{4}, but \boxed{5}", "5")),
        *(("It takes 10:05.", "10:05"), (r"The answer is 3\sqrt{2}.", r"3\sqrt{2}"), ("1,000 or more", "1000")),
    ],
)
def test_row_74_several_alternatives_without_a_box_are_no_answer(text: str, answer: str | None) -> None:
    pytest.importorskip("math_verify")
    scorer = load_scorer("math")
    assert scorer.final_answer is not None and (scorer.final_answer(text) is None) == (answer is None)
    assert all(scorer.score(text, each) == (each == answer) for each in ("4", "5", "6", "2516", "2025", answer or "3"))
