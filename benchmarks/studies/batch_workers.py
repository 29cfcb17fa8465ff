"""Rows a second of a batch job with one worker and with two, a core each.

Run with ``python -m benchmarks.studies.batch_workers``; ``--rows 20`` for a quick look.  It prints one JSON line.  The
rate is of the rows behind a worker's first call, so that loading models and starting Ray are left out; ``seconds`` of a
job has all but the start of Ray.  The machine needs three idle cores for a figure that can be quoted: the third one is
for Ray and the writer.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stree.bench.records import environment
from stree.integrations.batch_folder import open_job
from stree.integrations.batch_generate import RowGenerator
from stree.integrations.batch_rows import Row
from stree.integrations.ray import local_ray, run_rows

BAR = 1.5
MAX_BATCH = 8


def load(new_tokens: int) -> RowGenerator:
    """Load the bundled pair in a worker."""
    import stree
    from stree.inputs import load_tokenizer, locate

    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"), "cpu")
    drafter = stree.drafters.load(locate("bundled", "drafter"), lm)
    options = {"budget": "auto", "ignore_eos": True}
    return RowGenerator(
        lm, load_tokenizer(locate("bundled", "target")), drafter, max_new_tokens=new_tokens, max_batch=MAX_BATCH,
        options=options,
    )  # fmt: skip


def measure(num_rows: int, new_tokens: int, workers: int) -> dict[str, Any]:
    """Run a job; return its seconds, and its rows a second behind the first results of every worker."""
    rows = [
        Row(number, number, {"prompt": f"def function_{number}(x, y):\n    return", "seed": number})
        for number in range(num_rows)
    ]
    times = []
    with TemporaryDirectory() as folder, open_job(Path(folder) / "out", {}) as job:
        start = time.perf_counter()
        for result in run_rows(
            job.pending(rows), lambda: load(new_tokens), workers=workers, gpus_per_worker=0, max_batch=MAX_BATCH
        ):
            job.add([result])
            times.append(time.perf_counter() - start)
        assert len(job.finished) == num_rows
    # Results come in batches: those within 50 ms of the first are of the batch that ends the start.
    behind = sum(seconds > times[0] + 0.05 for seconds in times)
    return {"workers": workers, "seconds": times[-1], "rows_per_s": behind / (times[-1] - times[0])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    with local_ray(2):
        jobs = [measure(arguments.rows, arguments.new_tokens, workers) for workers in (1, 2, 2, 1)]
    rates = {count: sum(job["rows_per_s"] for job in jobs if job["workers"] == count) / 2 for count in (1, 2)}
    record = {"bench": "batch_workers", "rows": arguments.rows, "new_tokens": arguments.new_tokens, "jobs": jobs}
    print(json.dumps(record | {"ratio": rates[2] / rates[1], "bar": BAR, "env": environment(None)}))
