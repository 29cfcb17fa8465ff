"""Time other tiles than those of `stree.kernels.tiles` on this GPU, and print the entries that are best here.

Run: python -m benchmarks.gpu.retune_tiles [--ops ssd_step] [--nodes 16 32 64] [--batches 1 16] [--minutes 9] --out DIR
Without a GPU: TRITON_INTERPRET=1 python -m benchmarks.gpu.retune_tiles --smoke; its times are not meaningful.

Every candidate is compared with the reference in float64 first, and a wrong one is not timed.  An entry serves several
shapes: the best has the smallest mean, over them, of the logarithm of its time beside that of the entry in the table.
gpu_tiles.jsonl gets a JSON line for every measurement and every entry; "lines" in the last line of output replace those
of the tables in `kernels/tiles.py`.

When the time is up it ends behind the case that runs, and chooses from what is measured.  Several processes build
the candidates first; that is most of the work all the same, so only the first model shape of an operation is tuned, if
not all are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu.case import Case, copied
from benchmarks.gpu.run import Run, begin, command_line
from benchmarks.gpu.supervise import WORKERS, Supervisor, Task, shares
from stree.bench.records import Record, failure
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
    """A table of tiles that records the key last looked up, and gives the entry ``other`` if it is set."""

    key: Any = None
    other: Entry | None = None

    def __getitem__(self, key: Any) -> Entry:
        """The entry of a key, or the one to try in its place."""
        self.key = key
        found: Entry = super().__getitem__(key) if self.other is None else self.other
        return found


def measure(case: Case, table: Watched, dtype: torch.dtype, device: torch.device) -> Iterator[Record]:
    """Compare each candidate with the reference, then time it; the first one is the entry in the table.

    ``ratio`` is an entry's time beside that of the first one that was timed; on a CPU there is one other candidate.
    """
    generator = torch.Generator(device).manual_seed(0)
    first = case.make(generator)
    expected, call = case.expected(first), case.providers["triton"]
    table.key = table.other = None
    try:
        call(copied(first))
    except Exception:  # the present entry may have no room here, others may have
        if table.key is None:
            raise
    key, present, base = table.key, table[table.key], None
    others = [entry for entry in itertools.product(*TABLES[case.op][1]) if entry != present]
    sets = case.input_sets(generator)
    for entry in [present, *(others if device.type == "cuda" else others[:1])]:
        table.other = entry
        record = {"op": case.op, "params": dict(case.params), "dtype": str(dtype)[6:], "key": key, "entry": entry}
        record |= {"present": entry == present}
        try:
            record |= case.compared(call(copied(first)), expected, dtype)
            if record["correct"]:
                record |= case.timed(call, sets, device)
                base = base or record["p50"]
                record["ratio"] = record["p50"] / base
        except Exception as problem:  # an entry that this GPU has no room for, say: no failure
            record["no_room"] = failure(problem)["problem"]
        yield record


def build_share(run: Run, options: argparse.Namespace, tables: Mapping[str, Watched], share: int, count: int) -> None:
    """Launch every ``count``-th candidate, untimed, until the time is up; timing reports those that fail."""
    generator = torch.Generator(run.device).manual_seed(0)
    found = (
        (case, entry) for case, _ in tuned(options, run.device) for entry in itertools.product(*TABLES[case.op][1])
    )
    for case, entry in run.cases(itertools.islice(found, share, None, count), name=lambda pair: pair[0].op):
        tables[case.op].other = entry
        with contextlib.suppress(Exception):
            case.providers["triton"](case.make(generator))


def choose(records: Sequence[Record]) -> list[Record]:
    """The best entry of each key among those right in all its cases: the smallest mean logarithm of times."""
    groups: dict[tuple[str, Any], dict[Entry, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[record["op"], record["key"]][record["entry"]].append(math.log(record.get("ratio", math.inf)))
    present = {(record["op"], record["key"]): record["entry"] for record in records if record["present"]}
    chosen = []
    for (op, key), entries in groups.items():
        means = {entry: sum(logs) / len(logs) for entry, logs in entries.items()}
        best, now = min(means, key=means.__getitem__), present[op, key]
        if means[best] < math.inf:
            chosen.append({"op": op, "key": key, "best": best, "now": now, "gain": math.exp(means[now] - means[best])})
    return chosen


def tuned(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Case, torch.dtype]]:
    """List the cases that are tuned."""
    kinds = gpu_cases.SMALL if options.smoke else gpu_cases.KINDS
    if not options.all_shapes:
        kinds = [(make, dict([*shapes.items()][:1])) for make, shapes in kinds]
    sizes = [(2, 5)] if options.smoke else list(itertools.product(options.batches, options.nodes))
    for dtype in [torch.float32] if options.smoke else [getattr(torch, name) for name in options.dtypes]:
        for case in gpu_cases.cases(kinds, sizes, dtype, device):
            if case.op in options.ops:
                yield case, dtype


def measure_all(run: Run, options: argparse.Namespace, tables: Mapping[str, Watched]) -> None:
    """Measure every case until the time is up; a case that fails is a record."""
    if run.device.type == "cuda":
        task = Task("builds", (sys.executable, "-m", "benchmarks.gpu.retune_tiles", *sys.argv[1:]))
        with tempfile.TemporaryDirectory() as folder:
            supervisor = Supervisor(Path(folder, "builds.jsonl"), (time.monotonic() + run.deadline) / 2)
            supervisor.run(shares(task, WORKERS), WORKERS)
    for case, dtype in run.cases(tuned(options, run.device), name=lambda pair: pair[0].op):
        with run.part(bench="retune_tiles", adds=False, op=case.op, params=dict(case.params)):  # may be too large
            for record in measure(case, tables[case.op], dtype, run.device):
                run.add(record)


def main() -> int:
    """Measure, choose and print."""
    parser = command_line(__doc__, "gpu_tiles.jsonl")
    parser.add_argument("--ops", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--all-shapes", action="store_true", help="not only the first model shape of each operation")
    parser.add_argument("--share", type=int, nargs=2, help="only launch share I of N of the candidates: I N")
    options, run = begin(parser, is_interpreted=True)
    tables = {op: Watched(getattr(tiles, TABLES[op][0])) for op in options.ops}
    for op, watched in tables.items():
        setattr(tiles, TABLES[op][0], watched)
    with torch.inference_mode():
        if options.share:
            build_share(run, options, tables, *options.share)
            return 0
        measure_all(run, options, tables)
    entries = [record for record in run.records if "entry" in record]
    best = choose(entries)
    for line in best:
        run.add(line)
    titles = ["table", "key", "now", "best", "times faster" if run.device.type == "cuda" else "not meaningful"]
    rows = [[TABLES[b["op"]][0], b["key"], b["now"], b["best"], f"{b['gain']:.2f}"] for b in best]
    lines = [f"{TABLES[line['op']][0]}:    {line['key']}: {line['best']}," for line in best]
    return run.report(titles, rows, measured=len(entries), entries=len(best), lines=lines)


if __name__ == "__main__":
    sys.exit(main())
