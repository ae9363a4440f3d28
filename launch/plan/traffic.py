"""Collectives of a compiled program: how often each runs, along which mesh axes, and the bytes that it returns."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh

from specjax.testing.hlo import COLLECTIVES, Instruction, Program, joined_axes

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = ("while", "conditional", "call", "async-start")


class Kind(NamedTuple):
    """A kind of collective: the operation, and the mesh axes whose devices take part."""

    operation: str
    axes: tuple[str, ...]


@dataclass
class Traffic:
    """Counts of collectives, and the bytes that each device receives from them, by kind."""

    count: Counter[Kind] = field(default_factory=Counter)
    size: Counter[Kind] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.size.values())

    def add(self, other: "Traffic", times: int = 1) -> None:
        for kind in other.count:
            self.count[kind] += times * other.count[kind]
            self.size[kind] += times * other.size[kind]


class Collectives(NamedTuple):
    """Collectives of a program, by how often they run.

    The number of turns of some loops depends on data: one over rounds ends when all rows have ended. Of several such
    loops, and of the branches of a conditional, only the one that moves the most bytes counts.

    Attributes:
        fixed: a known number of times.
        outer: once per turn of a loop that holds another such loop: the admission of waiting sequences.
        turn:  once per turn of a loop that holds no other: a round.
    """

    fixed: Traffic
    outer: Traffic
    turn: Traffic

    @property
    def total(self) -> int:
        return sum(part.total for part in self)


def collectives_of(program: Program, mesh: Mesh, computation: str | None = None) -> Collectives:
    """Return the collectives of a compiled program, or of one computation in it, including those it calls."""
    fixed, outer, turn = Traffic(), Traffic(), Traffic()
    for line in program.computations[computation or program.entry]:
        operation = line.opcode.removesuffix("-start")
        if operation in COLLECTIVES:
            kind = Kind(operation, joined_axes(line.line, mesh))
            fixed.add(Traffic(Counter({kind: 1}), Counter({kind: received(line)})))
        elif line.opcode in _CALLS:
            called = sorted(line.references & program.computations.keys())
            inner, trips = [collectives_of(program, mesh, name) for name in called], _TRIPS.search(line.line)
            if line.opcode == "conditional":
                inner = [max(inner, key=lambda part: part.total)]
            elif line.opcode == "while" and not trips and not _runs_once(program, line):
                inner = [_of_a_turn(inner)]
            for part in inner:
                fixed.add(part.fixed, int(trips[1]) if trips else 1)
                outer, turn = (
                    max(pair, key=lambda each: each.total) for pair in ((outer, part.outer), (turn, part.turn))
                )
    return Collectives(fixed, outer, turn)


def _of_a_turn(parts: list[Collectives]) -> Collectives:
    """Return the collectives of one turn of a loop with this condition and body."""
    once = Traffic()
    for part in parts:
        once.add(part.fixed)
    inner = max(parts, key=lambda part: part.turn.total)
    if not inner.turn.total:
        return Collectives(Traffic(), Traffic(), once)
    once.add(inner.outer)
    return Collectives(Traffic(), once, inner.turn)


def _runs_once(program: Program, loop: Instruction) -> bool:
    """Return whether a loop is a branch of `kernels.gpu.run_if`: its condition reads a flag and computes nothing."""
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    assert condition
    return all(line.opcode in ("parameter", "get-tuple-element") for line in program.computations[condition[1]])


def received(line: Instruction) -> int:
    """Return the bytes of a collective's result on one device."""
    sizes = line.sizes
    if line.opcode == "collective-permute-start":
        return sizes[1]
    # Start operations return their operands too, except the start of an all-reduce.
    has_operands = line.opcode.endswith("-start") and not line.opcode.startswith("all-reduce")
    return sum(sizes[len(sizes) // 2 :] if has_operands else sizes)
