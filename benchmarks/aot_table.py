"""Compile the Triton kernels ahead of time, without a GPU, at the shapes of real models: registers, spills, memory.

Run: python benchmarks/aot_table.py [--arch 90] [--nodes 16 64] [--out FILE] [--check]

Launches with one machine code share a build, as they do in Triton's cache.  A run that is cut short leaves the records
that it has in FILE, with the version of Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aot_attention
import aot_delta
import aot_diagonal
import aot_growth
import aot_law
import aot_mamba2
import aot_norm
import aot_pointwise
import aot_traversal
import torch
import triton
from aot_build import Build, Record

SHARED_LIMIT = {80: 166912, 90: 232448}  # bytes a block may ask for: A100 163 KiB, H100 and H200 227 KiB
NODES = (1, 4, 16, 32, 64, 128)

# Operation -> how a launch is described, by model shape, nodes and dtype, and the shapes by model.
BUILDERS: Mapping[str, tuple[Callable[[Any, int, torch.dtype], Build], Mapping[str, Any]]] = {
    **aot_mamba2.BUILDERS,
    **aot_norm.BUILDERS,
    **aot_pointwise.BUILDERS,
    **aot_diagonal.BUILDERS,
    **aot_delta.BUILDERS,
    **aot_attention.BUILDERS,
    **aot_traversal.BUILDERS,
    **aot_growth.BUILDERS,
    **aot_law.BUILDERS,
}


def builds(nodes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Record, Build]]:
    """List every launch of the table with the names that its record has."""
    for op, (builder, shapes) in BUILDERS.items():
        for model, shape in shapes.items():
            for n in nodes:
                for dtype in dtypes:
                    yield {"op": op, "model": model, "nodes": n, "dtype": str(dtype)[6:]}, builder(shape, n, dtype)


def main() -> int:
    """Compile and print the table; with --check, fail on spills (16-64 nodes, sm_90) and on too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--ops", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="file that the records are written to")
    parser.add_argument(
        "--distinct",
        action="store_true",
        help="one build for each tile and its switches, at the first model that has it",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 on spills or too much shared memory")
    options = parser.parse_args()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.unlink(missing_ok=True)
    failed = False
    for record in compiled(options):
        record |= {"triton": triton.__version__}
        failed |= is_bad(record)
        print(json.dumps(record), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return int(options.check and failed)


def compiled(options: argparse.Namespace) -> Iterator[Record]:
    """Compile the launches that were asked for, each machine code once."""
    tiles: set[Any] = set()
    known: dict[Any, Record] = {}
    for arch in options.arch:
        for names, build in builds(options.nodes, [getattr(torch, name) for name in options.dtypes]):
            tile = (arch, names["op"], names["dtype"], build.tile, build.switches)
            if names["op"] not in options.ops or (options.distinct and tile in tiles):
                continue
            tiles.add(tile)
            key = (arch, build.tile.warps, build.tile.stages, build.source().hash())
            if key not in known:
                known[key] = build.compile(arch)
            yield {**names, "arch": f"sm_{arch}", **known[key], "warps": build.tile.warps}


def is_bad(record: Record) -> bool:
    """Tell whether a record breaks a limit."""
    spills = record["spill_bytes"] > 0 and record["arch"] == "sm_90" and 16 <= record["nodes"] <= 64
    return bool(spills or record["shared_bytes"] > SHARED_LIMIT[int(record["arch"][3:])])


if __name__ == "__main__":
    sys.exit(main())
