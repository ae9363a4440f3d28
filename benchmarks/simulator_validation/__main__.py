"""Hold benchmarks.simulate against every measured number that we know: writes validation.md beside it and the results.

Run from the repository's root: python -m benchmarks.simulator_validation
"""

import json

from benchmarks.simulation.held_out import RESULTS
from benchmarks.simulator_validation.answers import results
from benchmarks.simulator_validation.cells import cells
from benchmarks.simulator_validation.page import PAGE, page


def main() -> None:
    """Write the page and its results."""
    found = results(cells())
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
