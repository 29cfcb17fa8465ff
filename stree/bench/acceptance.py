"""Acceptance by position, a user's speed, and what a step would emit if all that it drafts was right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from stree.bench.methods import PEERS
from stree.bench.records import Record

__all__ = ["acceptance_by_depth", "most_tokens", "user_speed"]


def acceptance_by_depth(blocks: Sequence[Record]) -> list[float]:
    """Share of the steps that accepted a node at depth d that accepted one at depth d + 1, for d = 0, 1, ..., pooled.

    SPEED-Bench (arXiv 2604.09557) calls it the conditional acceptance rate.
    """
    reached = [sum(counts) for counts in zip_longest(*map(_reached, blocks), fillvalue=0)]
    return [now / before for before, now in zip(reached, reached[1:], strict=False) if before]


def _reached(block: Record) -> list[int]:
    """Count the steps of a record's sequences that accepted a node at each depth; the root is depth 0."""
    counts = [float(block["sequence_steps"])]
    for share in block.get("acceptance_by_depth", ()):
        counts.append(counts[-1] * share)
    return [round(count) for count in counts]


def user_speed(blocks: Sequence[Record]) -> float | None:
    """Tokens a second of one sequence behind its first token, as one user sees them; None where that is not known."""
    if any(block["ttft_s"] is None for block in blocks):
        return None
    seconds = sum(sum(map(len, block["tokens"][0])) / block["p50"] - block["ttft_s"] for block in blocks)
    return sum(len(block["tokens"][0][0]) - 1 for block in blocks) / seconds if seconds > 0 else None


def most_tokens(row: Record) -> float:
    """Tokens that a step of a row would emit if all that it drafts was right.

    A chain of the same nodes, as long as draft calls make one: a call adds a layer, but for retrieval and heads that
    draft blocks, which may be as deep as they have nodes.
    """
    if row["drafter"] == "model" and not row["drafts_blocks"]:
        return float(min(row["draft_calls"] + 1, row["verified"]))
    return float(row["verified"]) if row["drafter"] not in PEERS or row["tau"] > 1 else 1.0
