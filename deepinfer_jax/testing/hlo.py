"""What a compiled program contains: read from the text of its HLO module."""

import collections
import dataclasses
import re
from collections.abc import Collection

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Operations that write all of their operand anew. A conversion is a copy in another dtype.
_COPIES = frozenset({"copy", "copy-start", "convert", "transpose", "pad", "concatenate", "select"})

# Names for what exists already.
_FREE = frozenset({"bitcast", "constant", "get-tuple-element", "parameter", "tuple"})

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLEES = re.compile(r"\b(calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction; arrays: dtype and shape of what it makes, several for a tuple."""

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    computation: str
    is_fused: bool  # inside a fusion: its value need not exist in memory
    text: str


def instructions(text: str) -> tuple[Instruction, ...]:
    """Every instruction of `compiled.as_text()`."""
    fused = set(_CALLED.findall(text))
    found, computation = [], ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            arrays = tuple((dtype, _shape(dims)) for dtype, dims in _ARRAY.findall(match[2]))
            found.append(
                Instruction(
                    name=match[1],
                    opcode=match[3],
                    arrays=arrays,
                    computation=computation,
                    is_fused=computation in fused,
                    text=line.strip(),
                )
            )
    return tuple(found)


def repetitions(found: Collection[Instruction], text: str) -> dict[str, int]:
    """How often each computation runs in one call of the program; found: the instructions of `text`.

    A loop whose trip count the text does not tell counts once, and so does every branch of a conditional.
    """
    entry = next(line.split()[1].lstrip("%") for line in text.splitlines() if line.startswith("ENTRY "))
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for one in found:
        trips = _TRIPS.search(one.text)
        for role, names in _CALLEES.findall(one.text):
            times = int(trips[1]) if trips and role == "body" else 1
            calls[one.computation] += [(name.strip().lstrip("%"), times) for name in names.strip("{}").split(",")]
    total: collections.Counter[str] = collections.Counter()

    def run(computation: str, times: int) -> None:
        total[computation] += times
        for name, more in calls[computation]:
            run(name, times * more)

    run(entry, 1)
    return dict(total)


def launches(text: str) -> int:
    """Instructions of the main computation that are work for a device: kernels, copies, collectives; a loop is one."""
    entry = next(line.split()[1].lstrip("%") for line in text.splitlines() if line.startswith("ENTRY "))
    return sum(one.computation == entry and one.opcode not in _FREE for one in instructions(text))


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(size) for size in dims.split(",") if size)


def collectives(text: str) -> dict[str, int]:
    """How often each kind of collective occurs; an asynchronous pair counts once."""
    opcodes = (i.opcode.removesuffix("-start") for i in instructions(text))
    return dict(sorted(collections.Counter(op for op in opcodes if op in COLLECTIVES).items()))


def whole_copies(text: str, shapes: Collection[tuple[int, ...]]) -> tuple[Instruction, ...]:
    """Instructions that write a whole array of one of these shapes anew, in whatever dtype.

    A buffer that is updated in place has none. The shapes must belong to nothing else in the program.
    """
    wanted = set(shapes)
    return tuple(i for i in instructions(text) if i.opcode in _COPIES and any(shape in wanted for _, shape in i.arrays))
