"""Time the reference operations of one small layer on the CPU: microseconds a call, as JSON lines.

Run: python benchmarks/bench_reference.py [--nodes 1 16 64] [--runs 300]

The commit of a path is included.  Nothing is compared here: tests/operations does that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath, Topology

HEADS, HEADDIM, DSTATE, GROUPS, WIDTH, ROOM = 8, 64, 64, 1, 4, 64
CHANNELS = HEADS * HEADDIM + 2 * GROUPS * DSTATE


def make_calls(n: int) -> dict[str, Callable[[], object]]:
    """Prepare one call of every timed operation for a binary tree of n nodes, batch 1."""
    parents = torch.tensor([[(i - 1) // 2 if i else -1 for i in range(n)]], dtype=torch.int32)
    length = min(n, 4)
    path, lengths = torch.zeros(1, length, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    topology, accepted = Topology.of(parents, WIDTH, jumps=True), AcceptedPath.of(path, lengths, WIDTH)
    xbc, dt = torch.randn(1, n, CHANNELS), torch.randn(1, n, HEADS)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    window, stash_conv = torch.zeros(1, CHANNELS, WIDTH - 1), torch.zeros(1, ROOM, CHANNELS)
    state, stash_xbc = torch.zeros(1, HEADS, HEADDIM, DSTATE), torch.zeros(1, ROOM, CHANNELS)
    stash_dt, head = torch.zeros(1, ROOM, HEADS), torch.ones(HEADS)
    q, k = torch.randn(1, n, HEADS, HEADDIM), torch.randn(1, n, 2, HEADDIM)
    cache, values = torch.zeros(1, 2, 256, HEADDIM), torch.zeros(1, 2, 256, HEADDIM)
    stash_k, stash_v = torch.zeros(1, ROOM, 2, HEADDIM), torch.zeros(1, ROOM, 2, HEADDIM)
    delta, stash_u = torch.zeros(1, HEADS, HEADDIM, HEADDIM), torch.zeros(1, ROOM, HEADS, HEADDIM)
    unit, total = torch.nn.functional.normalize(k, dim=-1), torch.tensor([200], dtype=torch.int32)
    selective, stash_B = torch.zeros(1, 512, 16), torch.zeros(1, ROOM, 16)
    stash_x, stash_size = torch.zeros(1, ROOM, 512), torch.zeros(1, ROOM, 512)
    x, B, rates = xbc[..., :512], xbc[..., :16], -torch.ones(512, 16)
    return {
        "Topology.of": lambda: Topology.of(parents, WIDTH),
        "AcceptedPath.of": lambda: AcceptedPath.of(path, lengths, WIDTH),
        "conv_step": lambda: ops.conv_step(window, stash_conv, accepted, None, xbc, weight, bias, topology),
        "ssd_step": lambda: ops.ssd_step(
            state, stash_xbc, stash_dt, accepted, None, xbc, dt, -head, head, topology,
            headdim=HEADDIM, ngroups=GROUPS, D=head,
        ),
        "ssd_step without a path": lambda: ops.ssd_step(
            state, stash_xbc, stash_dt, None, None, xbc, dt, -head, head, topology,
            headdim=HEADDIM, ngroups=GROUPS, D=head,
        ),
        "attention_step": lambda: ops.attention_step(
            cache, values, total, stash_k, stash_v, accepted, None, q, k, k, topology, scale=0.1
        ),
        "gated_delta_step": lambda: ops.gated_delta_step(
            delta, stash_k, stash_u, stash_dt, accepted, None, unit, unit, q, -dt.abs(), dt.sigmoid(), topology
        ),
        "selective_step": lambda: ops.selective_step(
            selective, stash_x, stash_size, stash_B, accepted, None, x, x, rates, B, B, None, topology
        ),
    }  # fmt: skip


def time_call(call: Callable[[], object], runs: int) -> dict[str, float]:
    """Return percentiles of a call's time in microseconds, after a warm-up."""
    for _ in range(20):
        call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    cuts = statistics.quantiles(times, n=5)
    return {"p20": round(cuts[0], 1), "p50": round(statistics.median(times), 1), "p80": round(cuts[3], 1)}


def main() -> None:
    """Time every operation at every number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--runs", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    env = {"device": "cpu", "threads": 1, "torch": torch.__version__}
    with torch.inference_mode():
        for n in arguments.nodes:
            for name, call in make_calls(n).items():
                record = {"bench": name, "provider": "reference", "params": {"batch": 1, "n": n}, "unit": "us"}
                print(json.dumps(record | time_call(call, arguments.runs) | {"runs": arguments.runs, "env": env}))


if __name__ == "__main__":
    main()
