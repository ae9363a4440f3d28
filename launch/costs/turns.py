"""Turns of timed runs, with which another process can go on."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from launch.cli.phase import Phase
from launch.timing import machine, one_turn
from specjax.parallel import processes

Result = TypeVar("Result")
# What is kept of a turn, as JSON.
Record = dict[str, Any]


def timed_turns(
    phase: Phase,
    runs: Mapping[str, Callable[[int], Result]],
    record: Callable[[Mapping[str, Result]], Record] = dict,
    into: list[Record] | None = None,
) -> list[Record]:
    """Take turns in which every run is called once, and return their records: those of earlier processes come first.

    With several processes, the records are those of the primary. Raises Stopped at a signal, after the turn under way.
    Turns that were measured on another machine, or with other versions, are discarded with a line.

    phase:  its units are the turns.
    runs:   called with the number of the turn.
    record: from the results of a turn, by name, to what is kept of them as JSON.
    into:   empty list that is filled and returned: a caller that catches Stopped still has it.
    """
    # Turns of several processes may be reported together: each ratio is one of two runs in the same turn, so both were
    # measured by one process under the same load. Half a turn is never kept. Absolute seconds are medians over turns,
    # which another load changes like a load that changes while one process measures; another machine would not be that.
    here, records = processes.agree(machine()), list[Record]() if into is None else into
    if (saved := phase.restore("turns")) is not None:
        kept = json.loads(saved["json"].tobytes())
        if kept["machine"] == here:
            records += kept["turns"]
        else:
            there = ", ".join(kept["machine"].values())
            phase.discard(f"{phase.done} {phase.unit} of another machine or version are measured again ({there})")
    with phase:
        for turn in range(phase.done, phase.total):
            results = one_turn({name: partial(run, turn) for name, run in runs.items()}, turn)
            records.append(processes.agree(record(results)))
            text = json.dumps({"machine": here, "turns": records})
            phase.finish({"turns": {"json": np.frombuffer(text.encode(), np.uint8)}})
    return records
