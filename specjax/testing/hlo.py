"""Parser of a compiled program's HLO text, to check what its decode loop does."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import Mesh

from specjax.parallel.mesh import MODEL_AXES

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "collective-broadcast", "all-to-all")
# Opcodes that make no new array of their size, or write in place. Lines of a called fusion are checked by themselves.
FREE = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "scatter",
    "dynamic-update-slice",
    "while",
    "call",
    "fusion",
)

# Opcodes that need no work on the device.
NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")

# Groups along named axes of a mesh, whose devices may be in another order than their ids.
_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>'\w+'=\d+(?:,'\w+'=\d+)*)\]"
    r"(?:, device_ids=\(\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<joined>'\w+'(?:,'\w+')*)\}"
)

Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class Instruction:
    """One HLO line: `name` = `shape` `opcode`(...), in the computation `computation`."""

    computation: str
    name: str
    shape: str
    opcode: str
    line: str

    @cached_property
    def references(self) -> set[str]:
        """Return all names on the line: operands and called computations."""
        return set(re.findall(r"%([\w.\-]+)", self.line.split(" = ", 1)[1]))

    @property
    def arrays(self) -> list[tuple[int, ...]]:
        """Return the dimensions of each array of the result."""
        return [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", self.shape)]

    @property
    def dtypes(self) -> list[str]:
        """Return XLA's name of the dtype of each array of the result."""
        return re.findall(r"(\w+)\[[\d,]*\]", self.shape)

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each array of the result; a dtype of less than a byte counts as one."""
        bits = (re.search(r"\d+", dtype) for dtype in self.dtypes)
        each = [max(int(found[0]) // 8, 1) if found else 1 for found in bits]
        return [size * math.prod(dims) for size, dims in zip(each, self.arrays, strict=True)]

    @property
    def scope(self) -> str:
        """Return the operation it was traced from, as jax names it; empty where XLA does not say."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""

    @property
    def parameter(self) -> int:
        """Return the number of the argument that the line is."""
        found = re.search(r"parameter\((\d+)\)", self.line)
        assert found, f"no parameter: {self.line}"
        return int(found[1])

    @property
    def elements(self) -> int:
        return max((math.prod(dims) for dims in self.arrays), default=0)


class Program:
    """The computations of `Compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        # Number of the argument whose memory each result takes -> index of the result.
        aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", text.partition("\n")[0])
        self.aliased = {int(argument): int(result or 0) for result, argument in aliases}
        lines: list[Instruction] = []
        self.entry = name = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
                name = header[2]
                lines = self.computations[name] = []
                self.entry = name if header[1] else self.entry
            elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
                shape, rest = _split_shape(instruction[2])
                lines.append(Instruction(name, instruction[1], shape, rest.split("(", 1)[0], line.strip()))

    def loop(self, carries: tuple[int, ...], times: int) -> list[Instruction]:
        """Return all lines run by the one while loop that carries at least `times` arrays of these dimensions."""
        found = self.loops(carries, times)
        assert len(found) == 1, f"{len(found)} loops carry {times} arrays of {carries}"
        return found[0]

    def loops(self, carries: tuple[int, ...], times: int) -> list[list[Instruction]]:
        """Return all lines run by each such loop, for loops that contain no other such loop."""
        every = [x for lines in self.computations.values() for x in lines if _carries(x, carries, times)]
        return [run for run in map(self._run_by, every) if not any(_carries(x, carries, times) for x in run)]

    def launched(self, carries: tuple[int, ...], times: int) -> list[Instruction]:
        """Return the lines of that one loop's body, without those of its fusions and calls."""
        every = [x for lines in self.computations.values() for x in lines if _carries(x, carries, times)]
        bodies = {found[1] for x in every if (found := re.search(r"body=%?([\w.\-]+)", x.line))}
        assert len(bodies) == 1, f"{len(bodies)} loops carry {times} arrays of {carries}"
        return [line for line in self.computations[bodies.pop()] if line.opcode not in NOTHING]

    def switch(self, loops: int, carries: tuple[int, ...], times: int) -> list[Instruction]:
        """Return all lines run by the one conditional with `loops` such loops in its branches."""
        every = [line for lines in self.computations.values() for line in lines if line.opcode == "conditional"]
        found = [run for run in map(self._run_by, every) if sum(_carries(x, carries, times) for x in run) == loops]
        assert len(found) == 1, f"{len(found)} conditionals hold {loops} loops"
        return found[0]

    def _run_by(self, caller: Instruction) -> list[Instruction]:
        reached, waiting = set(), caller.references & self.computations.keys()
        while waiting:
            name = waiting.pop()
            reached.add(name)
            for line in self.computations[name]:
                waiting |= (line.references & self.computations.keys()) - reached
        return [line for name in sorted(reached) for line in self.computations[name]]

    def makers(self, dims: tuple[int, ...]) -> list[Instruction]:
        """Return the lines that make an array of these dimensions, rather than pass one on."""
        passing = (*NOTHING, "while", "call", "conditional")
        lines = (x for lines in self.computations.values() for x in lines)
        return [x for x in lines if x.opcode not in passing and dims in x.arrays]

    def copies(self, lines: list[Instruction], elements: int) -> list[Instruction]:
        """Return those of the lines that make an array of at least so many elements."""
        return [line for line in lines if line.opcode not in FREE and line.elements >= elements]


def _carries(line: Instruction, dims: tuple[int, ...], times: int) -> bool:
    return line.opcode == "while" and line.arrays.count(dims) >= times


def collectives(lines: list[Instruction]) -> list[Instruction]:
    """Return the lines that move data between devices; of an asynchronous pair, the start."""
    return [line for line in lines if line.opcode.removesuffix("-start").startswith(COLLECTIVES)]


def groups(line: str) -> Groups | None:
    """Return the groups of partitions that a collective joins; None: one group of all."""
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        return _explicit(pairs[1])
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return _explicit(listed[1])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims, reshape = _numbers(iota[1]), _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else tuple(range(len(reshape)))
        devices = np.arange(math.prod(reshape)).reshape(reshape).transpose(order).reshape(dims)
        return [tuple(group) for group in devices.tolist()]
    if named := _NAMED_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named["sizes"])}
        joined = re.findall(r"'(\w+)'", named["joined"])
        order = [list(sizes).index(name) for name in [*(name for name in sizes if name not in joined), *joined]]
        devices = np.arange(math.prod(sizes.values()))
        if named["dims"]:
            dims = _numbers(named["dims"])
            devices = devices.reshape(dims).transpose(_numbers(named["order"]) if named["order"] else range(len(dims)))
        devices = devices.reshape(tuple(sizes.values())).transpose(order)
        return [tuple(group) for group in devices.reshape(-1, math.prod(sizes[name] for name in joined)).tolist()]
    if "replica_groups={}" in line:
        return None
    raise ValueError(f"no groups in {line}")


def joined_axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices that a collective joins differ."""
    joined = groups(line)
    every = [tuple(range(mesh.size))] if joined is None else joined
    coordinates = [np.unravel_index(group, mesh.devices.shape) for group in every]
    differ = [any(np.ptp(places[i]) for places in coordinates) for i in range(len(mesh.axis_names))]
    return tuple(axis for axis, found in zip(mesh.axis_names, differ, strict=True) if found)


def within_shard(line: str, mesh: Mesh) -> bool:
    """Return whether a collective joins only devices of one data shard."""
    return set(joined_axes(line, mesh)) <= set(MODEL_AXES)


def _explicit(text: str) -> Groups:
    return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _split_shape(text: str) -> tuple[str, str]:
    """Split a line into the shape of its result, which may be a tuple, and the remaining text."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for end, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if not depth:
            return text[: end + 1], text[end + 2 :]
    raise ValueError(text)
