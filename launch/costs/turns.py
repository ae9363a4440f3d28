"""Turns of timed runs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from launch.phases.long_phase import LongPhase
from launch.timing import one_turn
from specjax.parallel import processes

Result = TypeVar("Result")
# What a report needs of a turn.
Record = dict[str, Any]


def timed_turns(
    phase: LongPhase,
    runs: Mapping[str, Callable[[int], Result]],
    record: Callable[[Mapping[str, Result]], Record] = dict,
    keep: Callable[[list[Record]], None] = lambda turns: None,
) -> list[Record]:
    """Take turns in which every run is called once, and return their records; with several processes the primary's.

    Raises Stopped at a signal, after the turn under way.

    phase:  its units are the turns.
    runs:   called with the number of the turn.
    record: from the results of a turn, by name, to what is kept of them.
    keep:   called after each turn with the records so far, to write them: no later error or kill loses them.
    """
    records = list[Record]()
    with phase:
        for turn in range(phase.total):
            results = one_turn({name: partial(run, turn) for name, run in runs.items()}, turn)
            records.append(processes.agree(record(results)))
            keep(records)
            phase.finish()
    return records
