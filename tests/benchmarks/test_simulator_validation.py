"""validation.md is what its results say, they are what benchmarks.simulate answers, and answers quote them."""

import hashlib

import pytest

from benchmarks.simulation.held_out import coverage, coverage_line, model_error, results
from benchmarks.simulation.options import SimulateArgs, with_run
from benchmarks.simulation.uncertainty import LEVEL, input_ranges
from benchmarks.simulator_validation.answers import as_json, model_errors, step_example, typical_error
from benchmarks.simulator_validation.answers import results as computed
from benchmarks.simulator_validation.cells import OWN, PAPER, Cell, cells
from benchmarks.simulator_validation.page import PAGE, page
from launch.cli.options import parse
from tests.benchmarks.points import check_table
from tests.documents import ROOT, blocks

CELLS = {(cell.source, cell.name): cell for cell in cells()}
FOUND = {(cell["source"], cell["name"]): cell for cell in results()["cells"]}
# One of each kind, which take a second together.
ASKED = [
    (PAPER, "Think, k = 5, DAPO"),
    ("vLLM#20780, Llama-3.1-8B on an H100, one row", "cost at k = 5"),
    (OWN, "32 rows of 1,024 positions, k = 3: cost"),
    (OWN, "1 row of 8,192 positions: ms"),
]


def errors_of_results() -> dict[str, dict[Cell, float]]:
    """Return the errors of all rounds with drafts, from the values in the results, which each leaves as they are."""
    errors: dict[str, dict[Cell, float]] = {"specjax": {}, "vllm-0.17": {}}
    for key, cell in CELLS.items():
        if cell.read in ("cost", "generation_speedup"):
            engine = "specjax" if cell.source == OWN else "vllm-0.17"
            ratio = FOUND[key]["answers"][engine][0] / cell.value
            errors[engine][cell] = abs((1 / ratio if cell.read == "cost" else ratio) - 1)
    return errors


def test_the_page_is_that_of_the_results_which_have_every_number():
    assert PAGE.read_text() == page(results()) and CELLS.keys() == FOUND.keys()
    for key, cell in CELLS.items():
        assert (FOUND[key]["options"], FOUND[key]["read"]) == (cell.options, cell.read)
        assert FOUND[key]["value"] == pytest.approx(cell.value, rel=1e-3)


@pytest.mark.parametrize("key", ASKED, ids=str)
def test_the_results_are_what_the_command_answers(key: tuple[str, str]):
    again = as_json(CELLS[key], errors_of_results())
    for engine, answer in again["answers"].items():
        assert answer == pytest.approx(FOUND[key]["answers"][engine], rel=0.01), engine


def test_answers_have_the_error_of_rounds_with_drafts_and_quote_the_coverage():
    for engine, errors in errors_of_results().items():
        error = model_error(engine)
        assert typical_error(errors) == pytest.approx(error, rel=0.02)
        assert sum(each <= 1.02 * error for each in errors.values()) >= LEVEL * len(errors)
        args, evidence = with_run(parse(SimulateArgs, ["--engine", engine], ""), ["--engine", engine])
        found = input_ranges(args.point, evidence, {})["drafted_factor"]
        assert (found.low, found.high) == (1 - error, 1 + error)
        for held, of in coverage(engine, results()["cells"]).values():
            assert f" {held} of {of} " in coverage_line(engine)
    assert coverage_line("specjax") in (ROOT / "docs" / "simulator.md").read_text().splitlines()


def test_what_it_must_show():
    """Every number of vLLM 0.17 and three quarters of our own rounds; numbers that gave constants do not count."""
    vllm, ours = (coverage(engine, results()["cells"]) for engine in ("vllm-0.17", "specjax"))
    assert vllm["numbers of vLLM 0.17 in arXiv 2604.26779"] == (12, 12)
    assert ours["of our own rounds on an H100"] == (7, 9)
    _, low, high = FOUND[ASKED[0]]["answers"]["vllm-0.17"]
    assert low < 0.84 < high, "drafts that slow generation down are not excluded"
    held_out = sum(of for counts in (vllm, ours) for _, of in counts.values())
    assert held_out == 2 * len(FOUND) - 3 - 2 * 4


@pytest.mark.slow
def test_all_results_are_what_the_command_answers():
    for cell in computed(cells())["cells"]:
        for engine, answer in cell["answers"].items():
            assert answer == pytest.approx(FOUND[cell["source"], cell["name"]]["answers"][engine], rel=0.01), cell


def test_the_example_of_the_page():
    command, shown = blocks(PAGE.read_text(), "bash")[0], blocks(PAGE.read_text())[0]
    found = step_example(command.split("benchmarks.simulate ")[1])
    assert found["lines"] == shown.splitlines()
    check_table(found["lines"])


def test_an_error_leaves_out_what_it_is_about():
    one, other, third = (Cell(source, name, 1.0, "cost", "") for source, name in (("a", "x"), ("a", "y"), ("b", "x")))
    assert typical_error({one: 0.5, other: 0.4, third: 0.1}, without=one) == pytest.approx(0.1 / 0.9)
    assert typical_error({one: 0.5, other: 0.4}, without=one) == pytest.approx(0.4 / 0.9)
    assert typical_error({one: 5.0}) == 0.9
    (errors,) = (found for found in model_errors([CELLS[ASKED[2]]]).values() if found)
    assert errors == pytest.approx({CELLS[ASKED[2]]: 0.02}, abs=0.005)


def test_the_case_for_the_design_is_as_it_was_written():
    """It is a forecast: whoever measures compares with it, and never edits it."""
    text = (PAGE.with_name("case_2026_11_26.md")).read_bytes()
    assert hashlib.sha256(text).hexdigest() == "11447163c65a9d6b379a49c66b5b1fe639ee889db9dc307d1c8568c83b43f6ac"
