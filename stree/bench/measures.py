"""From the runs of a batch of prompts to the figures of its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stree.bench.execute import Run
from stree.bench.records import Record

__all__ = ["PARTS", "distinct_4grams", "make_record"]

PARTS = ("draft", "verify", "accept", "commit")


def distinct_4grams(tokens: Sequence[int]) -> float:
    """Share of a text's 4-grams that are distinct; 1 for a text too short to have any."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def make_record(runs: Sequence[Run]) -> Record:
    """Sum the runs of one method on one batch of prompts; seconds by part are sums over all steps."""
    stats = [run.stats for run in runs]
    steps = [int(s["steps"]) for s in stats]
    own = [run.counts.reached[0] for run in runs]  # each sequence's own steps: those of a batch end at different times
    texts = [text for run in runs for text in run.tokens]
    firsts = [run.ttft_s for run in runs if run.ttft_s is not None]
    peaks = [run.peak_mib for run in runs if run.peak_mib is not None]
    sizes = [run.state_bytes for run in runs if run.state_bytes is not None]
    record: Record = {
        "steps": sum(steps),
        "tau": sum(s["tau"] * n for s, n in zip(stats, own, strict=True)) / max(sum(own), 1),
        "draft_calls": sum(s.get("draft_calls", 0) for s in stats),
        "verified": sum(s["nodes_per_step"] * n for s, n in zip(stats, steps, strict=True)),
        "drafted": sum(run.counts.drafted for run in runs) / len(runs[0].tokens),
        "reached": _listed([run.counts.reached for run in runs]),
        "tested_by_rank": _listed([run.counts.tested for run in runs]),
        "accepted_by_rank": _listed([run.counts.accepted for run in runs]),
        "ttft_s": sum(firsts) / len(firsts) if firsts else None,
        "peak_mib": max(peaks) if peaks else None,
        "state_bytes": max(sizes) if sizes else None,
        "distinct_4grams": sum(map(distinct_4grams, texts)) / len(texts),
        "tokens": [run.tokens for run in runs],
    }
    for part in (*PARTS, "prefill"):
        record[f"{part}_s"] = sum(s.get(f"{part}_s", 0.0) for s in stats)
    return record


def _listed(counters: Sequence[Counter[int]]) -> list[int]:
    """Add counters up into a list."""
    total: Counter[int] = sum(counters, Counter())
    return [total[place] for place in range(max(total, default=-1) + 1)]
