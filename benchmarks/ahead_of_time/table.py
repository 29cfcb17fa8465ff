"""Compile the Triton kernels without a GPU at the shapes of published models: registers, spills, shared memory.

Run: python -m benchmarks.ahead_of_time.table [--arch 90] [--nodes 16 64] [--out FILE] [--check]

Operations of models come from the cases of the GPU suite (batch 1); kernels of drafting, acceptance and bookkeeping
from a whole step of a tiny pair with a large vocabulary.  Launches with the same machine code share a build, as they do
in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.ahead_of_time.builds import Build, operation_builds, step_builds
from stree.bench.records import Record, append

SHARED_LIMIT = {80: 166912, 90: 232448}  # bytes a block may ask for: A100 163 KiB, H100 and H200 227 KiB
NODES = (1, 4, 16, 32, 64, 128)
VOCABULARIES = (50257, 151936)  # the first one's rows are not aligned


def builds(nodes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Record, Build]]:
    """List the builds of the table with the names in their records."""
    models: set[str] = set()
    for dtype in dtypes:
        for n in nodes:
            names = {"nodes": n, "dtype": str(dtype)[6:]}
            for params, build in operation_builds(n, dtype):
                models.add(build.name)
                yield {"kernel": build.name, **params, **names}, build
            for vocab in VOCABULARIES if n > 1 else ():
                for build in step_builds(n, vocab, dtype):
                    if build.name not in models:  # the forwards of a tiny model
                        yield {"kernel": build.name, "op": "step", "model": f"vocabulary of {vocab}", **names}, build


def compiled(options: argparse.Namespace) -> Iterator[Record]:
    """Compile the builds, each machine code once."""
    tiles: set[Any] = set()
    known: dict[Any, Record] = {}
    written: set[str] = set()
    found = [*builds(options.nodes, [getattr(torch, name) for name in options.dtypes])]
    for arch in options.arch:
        for names, build in found:
            tile = (arch, names["dtype"], build.name, build.switches)
            if options.distinct and tile in tiles:
                continue
            tiles.add(tile)
            key = (arch, build.warps, build.stages, build.source.hash())
            if key not in known:
                known[key] = build.compile(arch)
            record = {**names, "arch": f"sm_{arch}", **known[key], "triton": version("triton")}
            if json.dumps(record) not in written:  # a step launches some kernels several times
                written.add(json.dumps(record))
                yield record


def is_bad(record: Record) -> bool:
    """Whether a record breaks a limit: spills at 16-64 nodes on sm_90, or too much shared memory."""
    spills = record["spill_bytes"] > 0 and record["arch"] == "sm_90" and 16 <= record["nodes"] <= 64
    return bool(spills or record["shared_bytes"] > SHARED_LIMIT[int(record["arch"][3:])])


def main() -> int:
    """Compile, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="file of JSON lines, replaced")
    parser.add_argument("--distinct", action="store_true", help="only the first model of each tile and its switches")
    parser.add_argument("--check", action="store_true", help="exit with 1 on spills or too much shared memory")
    options = parser.parse_args()
    if options.out:
        options.out.unlink(missing_ok=True)
    failed = False
    for record in compiled(options):
        failed |= is_bad(record)
        print(json.dumps(record), flush=True)
        if options.out:
            append(options.out, [record])
    return int(options.check and failed)


if __name__ == "__main__":
    sys.exit(main())
