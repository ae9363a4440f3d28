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
    """Collectives of a program: those that run a known number of times, and those of one turn of its longest loop.

    A loop over rounds ends when all rows have ended, so its number of turns depends on data. Of several such loops, and
    of the branches of a conditional, only the one that moves the most bytes counts.
    """

    fixed: Traffic
    turn: Traffic

    @property
    def total(self) -> int:
        return self.fixed.total + self.turn.total


def collectives_of(program: Program, mesh: Mesh, computation: str | None = None) -> Collectives:
    """Return the collectives of a compiled program, or of one computation in it, including those it calls."""
    fixed, turn = Traffic(), Traffic()
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
            elif line.opcode == "while" and not trips:
                one_turn = Traffic()
                for part in inner:
                    one_turn.add(part.fixed)
                    one_turn.add(part.turn)
                inner = [Collectives(Traffic(), one_turn)]
            for part in inner:
                fixed.add(part.fixed, int(trips[1]) if trips else 1)
                turn = max(turn, part.turn, key=lambda each: each.total)
    return Collectives(fixed, turn)


def received(line: Instruction) -> int:
    """Return the bytes of a collective's result on one device."""
    sizes = line.sizes
    if line.opcode == "collective-permute-start":
        return sizes[1]
    # Start operations return their operands too, except that of an all-reduce.
    has_operands = line.opcode.endswith("-start") and not line.opcode.startswith("all-reduce")
    return sum(sizes[len(sizes) // 2 :] if has_operands else sizes)
