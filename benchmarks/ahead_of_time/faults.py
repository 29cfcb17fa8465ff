"""Find in a compiled kernel what neither Triton's interpreter nor a table of registers shows.

Each is a fault that a GPU would turn into wrong or slow results without an error:

- a load through the read-only cache, which may return what the same launch has overwritten;
- a load and a store of the same addresses whose tensors are spread over threads in different ways, without a barrier
  between them: a thread may overwrite what another has still to read;
- a float32 operand of a TF32 product that nothing has rounded: tensor cores cut its last bits off;
- loads of 2 bytes in a loop of matrix products: they are not part of the pipeline, so every pass waits for memory;
- a launch that leaves the fusion of products and sums to the version of Triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stree.bench.records import Record

__all__ = ["NARROW", "faults"]

NARROW = "loads 2 bytes at a time in a loop of matrix products"  # inevitable where sizes are odd
MOST_NARROW = 2  # a pass: a tile of 16 x 16 is one element a thread of 8 warps

VALUE = re.compile(r"%[\w#]+")
DEFINED = re.compile(r"^\s*(%\w+)(?::\d+)? = (.*?)(?: loc\(.*)?$")
# What a value is made of, without how it is spread over threads.
SPREAD = re.compile(r"#(?:ttg\.\w+<\{(?:[^{}]|\{[^{}]*\})*\}>|\w+)|tensor<|loc\(.*$")
MOVES = ("ttg.convert_layout", "ttg.local_alloc", "ttg.local_load", "tt.trans", "ttg.memdesc_trans", "tt.reshape",
         "tt.broadcast", "tt.expand_dims", "ttg.memdesc_reinterpret")  # fmt: skip
BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "ttg.async_wait")
ROUNDED = ("cvt.rna.tf32", "arith.extf", "arith.andi", "arith.constant", "arith.subf")


def faults(asm: Mapping[str, str], options: Record) -> Iterator[str]:
    """Name the faults of a build, from its intermediate code, its assembly and the options of its launch."""
    if "enable_fp_fusion" not in options:
        yield "leaves the fusion of products and sums to Triton: no enable_fp_fusion"
    if "ld.global.nc" in asm["ptx"]:
        yield "loads through the read-only cache: ld.global.nc"
    code = _Code()
    for line in asm["ttgir"].splitlines():
        code.define(line)
        yield from code.unordered_stores(line)
        yield from code.unrounded_operands(line)
    narrow = _narrow_loads(asm["ptx"])
    if narrow > MOST_NARROW:
        yield f"{NARROW}: {narrow} loads"


@dataclass
class _Code:
    """A kernel's intermediate code up to some line; a name means what has defined it last.

    Attributes:
        defined: for each value what defines it: operation, operands and types.
        expressions: for each value a number, the same for all values that are computed alike.
        numbers: of expressions.
        loaded: for addresses, by number, the layouts and bounds of their loads since the last barrier.
    """

    defined: dict[str, str] = field(default_factory=dict)
    expressions: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    loaded: dict[int, list[tuple[str, set[tuple[str, ...]]]]] = field(default_factory=dict)

    def define(self, line: str) -> None:
        """Note what a line defines, if anything."""
        found = DEFINED.match(line)
        if found is None:
            return
        name, body = found.groups()
        self.defined[name] = body
        if body.startswith("ttg.convert_layout"):
            self.expressions[name] = self._number(VALUE.findall(body)[0])
        elif body.startswith(("scf.", "tt.load")):
            self.expressions[name] = self.numbers.setdefault(f"{name} {len(self.numbers)}", len(self.numbers))
        else:
            plain = VALUE.sub(lambda value: f"@{self._number(value[0])}", SPREAD.sub("", body))
            self.expressions[name] = self.numbers.setdefault(plain, len(self.numbers))

    def _number(self, value: str) -> int:
        """Return the number of a value's expression; arguments and results of loops have one of their own."""
        if value not in self.expressions:
            self.expressions[value] = self.numbers.setdefault(value, len(self.numbers))
        return self.expressions[value]

    def unordered_stores(self, line: str) -> Iterator[str]:
        """Name a store to addresses that were loaded in another layout since the last barrier."""
        body = line.split(" = ", 1)[-1].strip()
        if body.startswith(BARRIERS):
            self.loaded.clear()
        elif body.startswith(("tt.load", "tt.store")):
            is_load, operands, layout = body.startswith("tt.load"), VALUE.findall(body), _first_type(body)
            number = self._number(operands[0])
            bounds = self._bounds(operands[1 if is_load else 2]) if len(operands) > 2 - is_load else set()
            if is_load:
                self.loaded.setdefault(number, []).append((layout, bounds))
                return
            for before, others in self.loaded.get(number, ()):
                if before != layout and not _exclude_each_other(bounds, others):
                    yield f"stores as {layout} what it has loaded as {before}: no barrier"

    def _bounds(self, mask: str) -> set[tuple[str, ...]]:
        """List the comparisons that a mask is the conjunction of: predicate and both sides."""
        body = self.defined.get(mask, "")
        operands = VALUE.findall(body)
        if body.startswith(("arith.andi", *MOVES)):
            return {
                each for operand in operands[: 2 if body.startswith("arith") else 1] for each in self._bounds(operand)
            }
        if body.startswith("arith.cmpi"):
            sides = (str(self.expressions.get(operand, operand)) for operand in operands)
            return {(body.split()[1].rstrip(","), *sides)}
        return set()

    def unrounded_operands(self, line: str) -> Iterator[str]:
        """Name the float32 operands of a TF32 product that may have more than 11 bits."""
        is_tf32 = "inputPrecision = tf32 " in line or "inputPrecision = 0 " in line
        if is_tf32 and ("tt.dot" in line or "warp_group_dot " in line) and "xf32" in line.partition(" * ")[0]:
            for operand in VALUE.findall(line.split(" = ", 1)[1])[:2]:
                if not self._is_rounded(operand):
                    yield f"multiplies {operand} in TF32, which nothing has rounded"

    def _is_rounded(self, value: str) -> bool:
        body = self.defined.get(value, "")
        operands = VALUE.findall(body)
        if body.startswith((*MOVES, "tt.bitcast", "arith.bitcast")):
            return self._is_rounded(operands[0])
        if body.startswith("arith.select"):  # one side rounded, the other what is no number
            return any(self._is_rounded(operand) for operand in operands[1:])
        return any(word in body.partition(" : ")[0] or body.startswith(word) for word in ROUNDED)


def _exclude_each_other(some: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> bool:
    """Whether no element passes both masks: one asks for a < b, the other for a >= b."""
    opposite = {"slt": "sge", "sge": "slt", "sgt": "sle", "sle": "sgt"}
    return any((opposite.get(predicate, ""), *sides) in others for predicate, *sides in some)


def _first_type(body: str) -> str:
    """Return the type of the first operand: shape, element and layout."""
    return re.sub(r" loc\(.*$", "", body.rpartition(" : ")[2])


def _narrow_loads(ptx: str) -> int:
    """Count the loads of 2 bytes in the innermost loops that multiply matrices."""
    lines = ptx.splitlines()
    labels = {line.partition(":")[0]: place for place, line in enumerate(lines) if line.startswith("$L")}
    loops = []
    for place, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)
        if jump and labels.get(jump[1], place) < place:
            body = lines[labels[jump[1]] : place]
            if any(re.search(r"\b(?:wg)?mma\.", each) for each in body):
                loops.append((labels[jump[1]], place))
    inner = [one for one in loops if not any(one != two and one[0] <= two[0] and two[1] <= one[1] for two in loops)]
    return sum("ld.global" in line and ".b16" in line for begin, end in inner for line in lines[begin:end])
