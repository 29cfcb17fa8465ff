"""Bytes of a pending node against bytes of one full state, for published sizes, on meta tensors.

Run with ``python -m benchmarks.studies.memory``; it appends to benchmarks/results/memory/results.jsonl and prints a
table.  The tensors are those that decoding would allocate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.published import whole
from benchmarks.report import study
from stree.bench.records import ROOT, Record
from stree.cli.info import describe_model

# Bars of docs/gpu.md: nodes whose stash takes as much memory as one full state.
BARS = {"mamba2-2.7b": 100, "Nemotron-H-8B": 100, "Granite-4.0-H-tiny": 100, "Qwen3-Next-80B": 55}


def record_of(name: str) -> Record:
    """Make a record: bytes of a node's factors, and of a full state."""
    report: Mapping[str, Any] = describe_model(whole(name), torch.bfloat16)
    return {
        "bench": "memory",
        "provider": "stree",
        "params": {"model": name, "family": report["family"], "layers": report["layers"]},
        "dtype": report["dtype"],
        "metric": "stash",
        "unit": "bytes/node",
        "value": report["stash_bytes_per_node"],
        "state_bytes": report["state_bytes"],
        "nodes_per_state": round(report["nodes_per_state"], 1),
        "bar": BARS[name],
        "kv_stash_bytes": report["kv_stash_bytes_per_node"],
        "num_parameters": report["num_parameters"],
    }


def cells(record: Record) -> list[str]:
    """Return the line of the table that docs/results.md shows."""
    state, node = record["state_bytes"] / 2**20, record["value"] / 2**10
    ratios = (f"1/{record[name]:.0f}" for name in ("nodes_per_state", "bar"))
    return [record["params"]["model"], f"{state:.0f} MiB", f"{node:.0f} KiB", *ratios]


def records() -> list[Record]:
    """Measure all models."""
    return list(map(record_of, BARS))


if __name__ == "__main__":
    file = ROOT / "benchmarks" / "results" / "memory" / "results.jsonl"
    study(records, ["model", "one full state", "a node", "ratio", "bar"], cells, default=file)
