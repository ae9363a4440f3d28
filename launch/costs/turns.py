"""Turns of timed runs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from launch.cli.long_phase import LongPhase
from launch.timing import one_turn
from specjax.parallel import processes

Result = TypeVar("Result")
# What a report needs of a turn.
Record = dict[str, Any]


def timed_turns(
    phase: LongPhase,
    runs: Mapping[str, Callable[[int], Result]],
    record: Callable[[Mapping[str, Result]], Record] = dict,
    into: list[Record] | None = None,
) -> list[Record]:
    """Take turns in which every run is called once, and return their records; with several processes the primary's.

    Raises Stopped at a signal, after the turn under way.

    phase:  its units are the turns.
    runs:   called with the number of the turn.
    record: from the results of a turn, by name, to what is kept of them.
    into:   empty list that is filled and returned: a caller that catches Stopped still has it.
    """
    records = list[Record]() if into is None else into
    with phase:
        for turn in range(phase.total):
            results = one_turn({name: partial(run, turn) for name, run in runs.items()}, turn)
            records.append(processes.agree(record(results)))
            phase.finish()
    return records
