"""Time other tiles than those of `stree.kernels.tiles` on this GPU, and print the entries that are best here.

Run: python benchmarks/retune_tiles.py [--ops ssd_step] [--nodes 16 32 64] [--batches 1 16] --out FILE
Without a GPU: TRITON_INTERPRET=1 python benchmarks/retune_tiles.py --smoke; its times are not meaningful.

Every candidate is compared with the reference in float64 first, and a wrong one is not timed.  An entry serves several
shapes: the best has the smallest mean, over them, of the logarithm of its time.  FILE gets a JSON line for every
measurement and every entry; the lines printed last replace those of the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_cases
import torch
from gpu_clock import time_graph
from gpu_suite import CACHE_BYTES
from rich.console import Console
from rich.table import Table as Printed

from stree.bench.records import Record, append, environment
from stree.kernels import tiles

Entry = tuple[Any, ...]
# Operation -> its table in stree.kernels.tiles and the values to try at every place of an entry.
TABLES: Mapping[str, tuple[str, tuple[Sequence[Any], ...]]] = {
    "ssd_step": ("_SSD", ((32, 64, 128), (16, 32, 64), (4, 8), (2, 3))),
    "gated_delta_step": ("_GATED_DELTA", ((16, 32, 64), (16, 32), (4, 8), (2, 3))),
    "attention_step": ("_ATTENTION", ((16, 32, 64, 128), (16, 32, 64), (4, 8), (2, 4), ("tf32x3",))),
    "selective_step": ("_DIAGONAL", ((64, 128, 256, 512), (4, 8, 16), (1, 2))),
    "conv_step": ("_CONV", ((32, 64, 128, 256), (2, 4, 8), (1, 2))),
}


class Watched(dict):
    """A table of tiles that remembers the key last looked up, and gives another entry for it if told."""

    key: Any = None
    other: Entry | None = None

    def __getitem__(self, key: Any) -> Entry:
        """Give an entry, or the one to try in its place."""
        self.key = key
        found: Entry = super().__getitem__(key) if self.other is None else self.other
        return found


def candidates(op: str, present: Entry, smoke: bool) -> list[Entry]:
    """List the entry that stands in the table, then others; only one other at tiny sizes."""
    others = [entry for entry in itertools.product(*TABLES[op][1]) if entry != present]
    return [present, *others[: 1 if smoke else None]]


def measure(case: gpu_cases.Case, table: Watched, dtype: torch.dtype, device: torch.device) -> Iterator[Record]:
    """Compare each candidate with the reference, then time it."""
    generator = torch.Generator(device).manual_seed(0)
    first = case.make(generator)
    expected = case.expected(first)
    call, is_gpu = case.providers["triton"], device.type == "cuda"
    table.other = None
    call(gpu_cases.copied(first))
    key, present = table.key, table[table.key]
    sets = [case.make(generator) for _ in range(min(256, CACHE_BYTES // max(case.num_bytes, 1)) if is_gpu else 1)]
    for entry in candidates(case.op, present, smoke=not is_gpu):
        table.other = entry
        record = {"op": case.op, "params": dict(case.params), "dtype": str(dtype)[6:], "key": key, "entry": entry}
        record |= {"present": entry == present, "correct": False}
        try:
            error = float((call(gpu_cases.copied(first)).double() - expected).abs().max() / expected.abs().max())
            record |= {"error": error, "correct": error <= case.tolerance(dtype)}
            if record["correct"]:
                taken = time_graph(lambda: [call(inputs) for inputs in sets], device, len(sets))
                record |= {"metric": "latency" if is_gpu else "interpreter, not meaningful", "unit": "us", **taken}
        except Exception as problem:  # an entry that this GPU has no room for, say
            record["problem"] = f"{type(problem).__name__}: {problem}"[:300]
        yield record


def choose(records: Sequence[Record]) -> list[Record]:
    """Give the best entry of each key: the smallest mean logarithm of times among those right in all its cases."""
    groups: dict[tuple[str, Any], dict[Entry, list[float]]] = defaultdict(lambda: defaultdict(list))
    present = {(record["op"], record["key"]): record["entry"] for record in records if record["present"]}
    for record in records:
        time = record["p50"] if record["correct"] else math.inf
        groups[record["op"], record["key"]][record["entry"]].append(math.log(time))
    chosen = []
    for (op, key), entries in groups.items():
        means = {entry: sum(logs) / len(logs) for entry, logs in entries.items()}
        best, now = min(means, key=means.__getitem__), present[op, key]
        if means[best] < math.inf:
            chosen.append({"op": op, "key": key, "best": best, "now": now, "gain": math.exp(means[now] - means[best])})
    return chosen


def main() -> int:
    """Time the candidates of every case, write records, print the table and the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="file that the records are appended to")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a machine without a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.smoke and os.environ.get("TRITON_INTERPRET") == "1"):
        parser.error("tuning needs a CUDA device; without one pass --smoke and set TRITON_INTERPRET=1")
    kinds = gpu_cases.SMALL if options.smoke else gpu_cases.KINDS
    sizes = [(2, 5)] if options.smoke else list(itertools.product(options.batches, options.nodes))
    dtypes = [torch.float32] if options.smoke else [getattr(torch, name) for name in options.dtypes]
    tables = {op: Watched(getattr(tiles, TABLES[op][0])) for op in options.ops}
    for op, table in tables.items():
        setattr(tiles, TABLES[op][0], table)
    records: list[Record] = []
    with torch.inference_mode():
        for dtype in dtypes:
            for case in filter(lambda case: case.op in tables, gpu_cases.cases(kinds, sizes, dtype, device)):
                found = list(measure(case, tables[case.op], dtype, device))
                records += found
                report(options.out, found)
    best = choose(records)
    report(options.out, best)
    printed = Printed("table", "key", "now", "best", "times faster" if device.type == "cuda" else "not meaningful")
    for line in best:
        printed.add_row(
            TABLES[line["op"]][0], *(str(line[name]) for name in ("key", "now", "best")), f"{line['gain']:.2f}"
        )
    Console().print(printed)
    for line in best:
        print(f"{TABLES[line['op']][0]}:    {line['key']}: {line['best']},")
    wrong = sum(not record["correct"] and "problem" not in record for record in records)
    print(json.dumps({"bench": "retune_tiles", "measured": len(records), "entries": len(best), "wrong": wrong}))
    return int(wrong > 0)


def report(path: Path | None, records: Sequence[Record]) -> None:
    """Append records, with the machine they were made on, to a file if there is one."""
    if path:
        env = environment(torch.device("cuda") if torch.cuda.is_available() else None)
        append(path, [{**record, "env": env} for record in records])


if __name__ == "__main__":
    sys.exit(main())
