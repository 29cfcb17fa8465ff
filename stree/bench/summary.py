"""From records to rows: sums over prompts, paired bootstrap intervals, equal-node and equal-call comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from stree.bench.measures import PARTS
from stree.bench.records import Record

__all__ = ["Ratio", "Section", "best", "interval", "mean_tau", "sections", "summarise"]

Array = NDArray[Any]
Ratio = tuple[float, float | None, float | None]  # value and 95 % interval, None below two prompts
Blocks = dict[tuple[int, int], Record]  # (batch, turn) -> record


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one run, suite and temperature."""

    run: str
    suite: str
    temperature: float
    rows: tuple[Record, ...]


def interval(statistic: Callable[..., Array], *samples: Sequence[float]) -> Ratio:
    """Estimate a statistic of paired samples, one value a prompt, with a percentile bootstrap over prompts.

    Args:
        statistic: takes arrays and an axis.
        samples: of equal length.
    """
    arrays = [np.asarray(sample, dtype=float) for sample in samples]
    value = float(statistic(*arrays, axis=-1))
    if len(arrays[0]) < 2:
        return value, None, None
    found = bootstrap(arrays, statistic, paired=True, vectorized=True, method="percentile", rng=0).confidence_interval
    return value, float(found.low), float(found.high)


def _times(base: Array, other: Array, axis: int = -1) -> Array:
    """How many times less ``other`` takes."""
    return np.asarray(base.sum(axis) / other.sum(axis))


def _tau_ratio(tokens: Array, steps: Array, base_tokens: Array, base_steps: Array, axis: int = -1) -> Array:
    """Tokens a step over those of the base."""
    mine, theirs = tokens.sum(axis) / steps.sum(axis), base_tokens.sum(axis) / base_steps.sum(axis)
    return np.asarray(mine / theirs)


def mean_tau(blocks: Iterable[Record]) -> float:
    """Average tokens a step over the steps that each sequence of some records took part in."""
    known = list(blocks)
    return float(sum(block["tau"] * _own_steps(block) for block in known) / max(sum(map(_own_steps, known)), 1))


def _own_steps(block: Record) -> int:
    """Count the steps of each of a block's sequences: a batch steps on while any of them has not ended."""
    return int(sum(block["reached"][:1]))


def summarise(records: Sequence[Record]) -> list[Record]:
    """Turn one run's records into rows, one a (suite, temperature, method), in the order in which they were first met.

    A method of which one checked output is not the target's has no figures.
    """
    groups: dict[tuple[str, float, str], Blocks] = defaultdict(dict)
    rows: list[Record] = []
    for record in records:
        params = record["params"]
        if record["metric"] == "tokens_per_s":
            blocks = groups[params["suite"], params["temperature"], record["provider"]]
            blocks[params["batch"], params["turn"]] = record
    notes = {
        (r["params"]["suite"], r["params"]["temperature"], r["provider"]): r for r in records if r["metric"] == "check"
    }
    places = [(r["params"]["suite"], r["params"]["temperature"]) for r in records if "temperature" in r["params"]]
    order = list(dict.fromkeys(places))
    for key in sorted(dict.fromkeys([*notes, *groups]), key=lambda key: order.index(key[:2])):
        row: Record = dict(zip(("suite", "temperature", "method"), key, strict=True))
        note = notes.get(key, {})
        wrong = next((r for r in groups.get(key, {}).values() if r["lossless"] is False), None)
        if note.get("status", "ok") != "ok" or wrong is not None:
            rows.append(row | _failure(note if wrong is None else {**wrong, "status": "failed"}))
        elif groups.get(key):
            rows.append(row | _figures(list(groups[key].values()), note))
    for row in rows:
        if row["status"] == "ok":
            _compare(row, rows, groups)
    return rows


def _failure(note: Record) -> Record:
    """Say why a method has no figures."""
    names = ("status", "reason", "logit_gap", "logit_scale", "first_divergence", "p_value", "verifier")
    return {"lossless": None if note["status"] == "unavailable" else False, **{n: note[n] for n in names if n in note}}


def _figures(blocks: Sequence[Record], note: Record) -> Record:
    """Sum one method's records over prompts."""
    steps = max(sum(block["steps"] for block in blocks), 1)
    reached = _added(blocks, "reached")
    checked = [block["lossless"] for block in blocks if block["lossless"] is not None]
    gaps = [abs(block["logit_gap"]) / block["logit_scale"] for block in blocks if "logit_gap" in block]
    speeds = [(len(block["params"]["prompts"]), block["p50"]) for block in blocks]
    row: Record = {
        "status": "ok",
        "verifier": blocks[0]["verifier"],
        "engine": blocks[0]["params"]["engine"],
        "drafter": blocks[0]["params"]["drafter"],
        "growth": blocks[0]["params"]["growth"],
        "prompts": sum(count for count, _ in speeds),
        "tau": mean_tau(blocks),
        "draft_calls": sum(block["draft_calls"] for block in blocks) / steps,
        "drafted": sum(block["drafted"] * len(block["params"]["prompts"]) for block in blocks)
        / max(sum(map(_own_steps, blocks)), 1),
        "verified": sum(block["verified"] for block in blocks) / steps,
        "tokens_per_s": sum(count for count, _ in speeds) / sum(count / speed for count, speed in speeds),
        "ttft_ms": _mean(blocks, "ttft_s", 1e3),
        "peak_mib": _largest(blocks, "peak_mib"),
        "state_bytes": _largest(blocks, "state_bytes"),
        "kl_bits": _mean(blocks, "kl_bits"),
        "total_variation": _mean(blocks, "total_variation"),
        "distinct_4grams": _mean(blocks, "distinct_4grams"),
        "acceptance_by_depth": [after / before for before, after in zip(reached, reached[1:], strict=False)],
        "acceptance_by_rank": [
            yes / tested for yes, tested in zip(_padded(blocks), _added(blocks, "tested_by_rank"), strict=False)
        ],
        "lossless": all(checked) if checked else note.get("lossless"),
        "near_ties": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "p_value": note.get("p_value"),
        "greedy_twin": note.get("greedy_twin", False),
    }
    row["accepted"] = row["tau"] - 1
    for part in PARTS:
        row[f"{part}_ms"] = 1e3 * sum(block[f"{part}_s"] for block in blocks) / steps
    return row


def _padded(blocks: Sequence[Record]) -> list[int]:
    """Accepted children by rank, as long as the tested ones."""
    accepted, tested = _added(blocks, "accepted_by_rank"), _added(blocks, "tested_by_rank")
    return accepted + [0] * (len(tested) - len(accepted))


def _added(blocks: Sequence[Record], name: str) -> list[int]:
    """Add lists up, place by place."""
    width = max((len(block[name]) for block in blocks), default=0)
    return [sum(block[name][place] for block in blocks if place < len(block[name])) for place in range(width)]


def _mean(blocks: Sequence[Record], name: str, scale: float = 1.0) -> float | None:
    """Average what is known."""
    known = [block[name] for block in blocks if block.get(name) is not None]
    return scale * float(np.mean(known)) if known else None


def _largest(blocks: Sequence[Record], name: str) -> float | None:
    """Take the greatest of what is known."""
    return max((block[name] for block in blocks if block.get(name) is not None), default=None)


def _compare(row: Record, rows: Sequence[Record], groups: Mapping[tuple[str, float, str], Blocks]) -> None:
    """Set a row beside plain decoding, the best chain, and the chains of as many nodes and as many draft calls."""
    at = row["suite"], row["temperature"]
    section = [r for r in rows if (r["suite"], r["temperature"]) == at and r["status"] == "ok"]
    mine = groups[*at, row["method"]]
    chain = best(section, "chain")
    for name, other in (("over_plain", "plain"), ("over_chain", chain["method"] if chain else None)):
        is_there = any(r["method"] == other for r in section)
        row[name] = _speedup(groups[*at, other], mine) if other and is_there else None
    chains = [r for r in section if r["method"].startswith("chain")]
    for name, column, slack in (("equal_nodes", "verified", 0.5), ("equal_calls", "draft_calls", 0.25)):
        row[name], row[f"{name}_with"] = None, None
        if row["drafter"] != "model" or row in chains:
            continue
        near = min(chains, key=lambda r: abs(r[column] - row[column]), default=None)
        if near is not None and abs(near[column] - row[column]) <= slack:
            row[name], row[f"{name}_with"] = _more_tokens(groups[*at, near["method"]], mine), near["method"]


def _speedup(base: Blocks, other: Blocks) -> Ratio | None:
    """Compare over the prompts that both have run; each emits equally many tokens, so seconds a token compare."""
    both = base.keys() & other.keys()
    return interval(_times, *(_by_prompt(blocks, both, _seconds) for blocks in (base, other))) if both else None


def _more_tokens(base: Blocks, other: Blocks) -> Ratio | None:
    """Compare tokens a step over the prompts that both have run."""
    both = base.keys() & other.keys()
    samples = [
        _by_prompt(blocks, both, part)
        for blocks in (other, base)
        for part in (lambda record: record["tau"] * _own_steps(record), _own_steps)
    ]
    return interval(_tau_ratio, *samples) if both else None


def _by_prompt(blocks: Blocks, keys: Iterable[tuple[int, int]], part: Callable[[Record], float]) -> list[float]:
    """Sum a figure over the turns of each batch of prompts: turns of one conversation are no samples of their own."""
    sums: dict[int, float] = defaultdict(float)
    for batch, turn in sorted(keys):
        sums[batch] += part(blocks[batch, turn])
    return list(sums.values())


def _seconds(record: Record) -> float:
    """Give seconds for a token of each of a block's prompts."""
    return float(len(record["params"]["prompts"]) / record["p50"])


def best(rows: Sequence[Record], kind: str) -> Record | None:
    """Find the fastest method of a kind."""
    of_kind = [r for r in rows if r["method"].split(":")[0].split("@")[0] == kind and r["status"] == "ok"]
    return max(of_kind, key=lambda r: float(r["tokens_per_s"]), default=None)


def sections(run: str, rows: Sequence[Record]) -> list[Section]:
    """Group rows by suite and temperature."""
    found: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for row in rows:
        found[row["suite"], row["temperature"]].append(row)
    return [Section(run, *key, tuple(of_key)) for key, of_key in found.items()]
