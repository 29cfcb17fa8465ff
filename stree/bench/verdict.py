"""How an output was checked, in words."""

from __future__ import annotations

from stree.bench.methods import PEERS
from stree.bench.records import Record

__all__ = ["verdict_text"]


def verdict_text(row: Record) -> str:
    """Describe how an output was checked and with what result: of a row, or of a check that was not passed."""
    if row["status"] == "unfinished":
        return "UNFINISHED: not run yet"
    if row.get("unfinished"):
        return f"UNFINISHED, {row['unfinished']}; {verdict_text({**row, 'unfinished': None})}"
    if row["status"] == "unavailable":
        return f"cannot run: {row['reason']}"
    if row["status"] == "failed":
        if "logit_gap" in row:
            return f"FAILS: differs, logit gap {row['logit_gap']:.2g} of {row['logit_scale']:.2g}"
        return f"FAILS: p = {row['p_value']:.1g}" if "p_value" in row else "FAILS: differs"
    if row["method"].startswith("lossy"):
        return f"LOSSY by design ({row['verifier']})"
    if row["drafter"] == "transformers" or (row["drafter"] in PEERS and row["temperature"] > 0):
        return "the reference" if row["temperature"] == 0 else "own random numbers"
    if row["lossless"] is None and row["drafter"] == "none":
        return "the reference"
    if row["lossless"] is None:
        checked = "greedy identical" if row["greedy_identical"] else "not checked"
        return f"{checked}, distribution untested ({row['verifier']})"
    if row["p_value"] is not None:
        tokens = f", {row['tested_tokens']} tokens" if row.get("tested_tokens") else ""
        return f"distribution not rejected, p = {row['p_value']:.2g}{tokens} ({row['verifier']})"
    if row["near_ties"]:
        return f"near-ties, gap <= {row['largest_gap']:.0e} of scale ({row['verifier']})"
    return f"identical ({row['verifier']})"
