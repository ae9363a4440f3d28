"""Hold the simulator against every published number that we know: writes docs/validation.md and the results.

Run from the repository's root: python -m benchmarks.simulator_validation
"""

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.simulator_validation import bench_results, paper_8b, paper_235b, published, rounds_gpu
from benchmarks.simulator_validation.cells import PageSection
from benchmarks.simulator_validation.page import page, results

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "validation.md", ROOT / "benchmarks" / "results" / "simulator_validation.json"


def sections() -> Iterator[PageSection]:
    """Yield all sections."""
    first, *later = sections_without_mechanisms()
    yield from (first, *paper_8b.sections_with_mechanisms(), *later)


def sections_without_mechanisms() -> Iterator[PageSection]:
    """Yield the sections that fit no mechanism, in a few seconds."""
    yield paper_8b.acceptance()
    yield from (paper_235b.two_constants(), paper_235b.sheets_alone())
    yield published.steps()
    yield from published.rounds()
    yield rounds_gpu.section()
    yield from bench_results.sections()


def main() -> None:
    """Write the page and its results."""
    validation = results([*sections()])
    RESULTS.write_text(json.dumps(validation, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(validation), encoding="utf-8")


if __name__ == "__main__":
    main()
