"""From records to rows: sums over prompts, with intervals of ratios by a jackknife over prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from stree.bench.acceptance import acceptance_by_depth, most_tokens, user_speed
from stree.bench.methods import ASSISTED, PEERS
from stree.bench.records import Record

__all__ = [
    "PARTS", "Ratio", "compare", "interval", "pool", "sum_ratio", "summarise", "tau_of",
]  # fmt: skip

PARTS = ("draft", "verify", "accept", "commit")

Array = NDArray[Any]
Ratio = tuple[float, float | None, float | None]  # value and 95 % interval, None below three prompts
Blocks = dict[tuple[Any, Any], Record]  # (batch, (turn, seed)) -> record
RowKey = tuple[str, float, str]  # suite, temperature, method


def interval(statistic: Callable[..., Array], *samples: Sequence[float]) -> Ratio:
    """Estimate a positive statistic of paired samples, one value a prompt, with a 95 % interval over prompts.

    The interval is Student's on the logarithm, with the standard error of the delete-one jackknife (Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 11).  A percentile bootstrap is too narrow for few prompts.

    Args:
        statistic: a smooth function, such as a ratio of sums; takes arrays and an axis.
        samples: of equal length; below three there is no interval.
    """
    arrays = [np.asarray(sample, dtype=float) for sample in samples]
    value, n = float(statistic(*arrays, axis=-1)), len(arrays[0])
    if n < 3:
        return value, None, None
    others = ~np.eye(n, dtype=bool)
    without = np.log([float(statistic(*(array[kept] for array in arrays), axis=-1)) for kept in others])
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    factor = float(np.exp(student.ppf(0.975, n - 1) * error))
    return value, value / factor, value * factor


def sum_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Divide the sums of paired samples, one value a prompt, with the interval of ``interval``."""
    return interval(_over, above, below)


def tau_of(blocks: Blocks) -> Ratio | None:
    """Average tokens a step over the steps that each sequence of a method's records took part in, with an interval.

    None where no step was taken, or where a record of transformers' speculation is of a version that counted what was
    left of a text, which is no tau.
    """
    counts = _tau_counts(blocks, blocks)
    return None if counts is None else sum_ratio(*counts)


def _tau_counts(blocks: Blocks, keys: Iterable[tuple[Any, Any]]) -> tuple[list[float], list[float]] | None:
    """Sum tokens and steps of each batch of prompts; see ``tau_of``."""
    keys = [key for key in keys if _sequence_steps(blocks[key])]
    if not keys or any(blocks[key]["params"]["drafter"] in ASSISTED and "rows" not in blocks[key] for key in keys):
        return None
    tokens = _sums(blocks, keys, lambda block: block["tau"] * _sequence_steps(block))
    return tokens, _sums(blocks, keys, _sequence_steps)


def _sequence_steps(block: Record) -> int:
    """Count the steps of each of a block's sequences: those of a batch end at different steps."""
    return int(block["sequence_steps"])


def summarise(records: Sequence[Record]) -> list[Record]:
    """Make one row a (suite, temperature, method) of one run's records, in the order in which they first appear.

    A method of which one checked output is not the target's has no figures.
    """
    groups: dict[RowKey, Blocks] = defaultdict(dict)
    checks: dict[RowKey, Record] = {}
    for record in records:
        params = record["params"]
        if record["metric"] == "tokens_per_s":
            blocks = groups[params["suite"], params["temperature"], record["provider"]]
            blocks[params["batch"], (params["turn"], params.get("seed", 0))] = record
        elif record["metric"] == "check":
            checks[params["suite"], params["temperature"], record["provider"]] = record
    places = [(r["params"]["suite"], r["params"]["temperature"]) for r in records if "temperature" in r["params"]]
    order = list(dict.fromkeys(places))
    rows: list[Record] = []
    for key in sorted(dict.fromkeys([*checks, *groups]), key=lambda key: order.index(key[:2])):
        row: Record = dict(zip(("suite", "temperature", "method"), key, strict=True))
        check = checks.get(key, {"status": "ok"})
        wrong = next((r for r in groups.get(key, {}).values() if r["lossless"] is False), None)
        if wrong is not None:
            check = {**wrong, "status": "failed"}
        if check["status"] != "ok":
            rows.append(row | _failure(check))
        elif groups.get(key):
            rows.append(row | _figures(list(groups[key].values()), check) | _intervals(groups[key]))
    for row in rows:
        if row["status"] == "ok":
            _compare(row, rows, groups)
    return rows


def pool(records: Sequence[Record], rows: Sequence[Record]) -> list[Record]:
    """Make one row a (temperature, method) over the prompts of all suites.

    Args:
        records: of one run.
        rows: of ``summarise`` of these records; a method without figures in one suite is left out.
    """
    failed = {(row["temperature"], row["method"]) for row in rows if row["status"] != "ok"}
    pooled = []
    for record in records:
        params = record["params"]
        if record["metric"] == "tokens_per_s" and (params["temperature"], record["provider"]) not in failed:
            own = {"suite": "all suites", "batch": (params["suite"], params["batch"])}
            pooled.append({**record, "params": {**params, **own}})
    return summarise(pooled)


def compare(records: Sequence[Record], method: str, base: str) -> list[Record]:
    """Compare two methods of one run over the prompts of all suites, one row a temperature.

    Returns:
        rows with ``temperature``, ``texts``, the number that both have decoded, and ``speed`` and ``tau`` of ``method``
        over those of ``base`` on them; None where a tau is not known.

    Raises:
        ValueError: a method that the run does not have, or of which one output is not the target's.
    """
    groups: dict[tuple[float, str], Blocks] = defaultdict(dict)
    for record in records:
        if record["metric"] == "tokens_per_s":
            params = record["params"]
            blocks = groups[params["temperature"], record["provider"]]
            blocks[(params["suite"], params["batch"]), (params["turn"], params.get("seed", 0))] = record
    known = dict.fromkeys(name for _, name in groups)
    if unknown := {method, base} - known.keys():
        raise ValueError(f"the run has {', '.join(known)}; got {', '.join(sorted(unknown))}")
    wrong = {r["provider"] for r in records if r.get("lossless") is False or r.get("status") == "failed"}
    if failed := {method, base} & wrong:
        raise ValueError(f"an output of {', '.join(sorted(failed))} is not the target's")
    rows = []
    for temperature in dict.fromkeys(temperature for temperature, _ in groups):
        own, other = groups[temperature, method], groups[temperature, base]
        both = own.keys() & other.keys()
        above, below = _tau_counts(own, both), _tau_counts(other, both)
        tau = None if above is None or below is None else interval(_over_each, *above, *below)
        texts = sum(len(own[block]["params"]["prompts"]) for block in both)
        rows.append({"temperature": temperature, "texts": texts, "speed": _speedup(other, own), "tau": tau})
    return rows


def _failure(check: Record) -> Record:
    """Describe why a method has no figures."""
    names = ("status", "reason", "logit_gap", "logit_scale", "first_divergence", "p_value", "verifier")
    known = {name: check[name] for name in names if name in check}
    return {"lossless": None if check["status"] == "unavailable" else False, **known}


def _figures(blocks: Sequence[Record], check: Record) -> Record:
    """Sum one method's records over prompts."""
    steps = max(sum(block["steps"] for block in blocks), 1)
    checked = [block["lossless"] for block in blocks if block["lossless"] is not None]
    gaps = [abs(block["logit_gap"]) / block["logit_scale"] for block in blocks if "logit_gap" in block]
    speeds = [(len(block["params"]["prompts"]), block["p50"]) for block in blocks]
    first = [block["ttft_s"] for block in blocks if block["ttft_s"] is not None]
    return {
        "status": "ok",
        "verifier": blocks[0]["verifier"],
        "drafter": blocks[0]["params"]["drafter"],
        "budget": blocks[0]["params"]["budget"],
        "growth": blocks[0]["params"].get("growth"),
        "drafts_blocks": blocks[0]["params"].get("drafts_blocks", False),
        "prompts": len({(block["params"]["batch"], index) for block in blocks for index in block["params"]["prompts"]}),
        "draft_calls": sum(block["draft_calls"] for block in blocks) / steps,
        "verified": sum(block["verified"] for block in blocks) / steps,
        "tokens_per_s": sum(count for count, _ in speeds) / sum(count / speed for count, speed in speeds),
        "user_tokens_per_s": user_speed(blocks),
        "acceptance_by_depth": acceptance_by_depth(blocks),
        "ttft_ms": 1e3 * float(np.mean(first)) if first else None,
        "distinct_4grams": float(np.mean([block["distinct_4grams"] for block in blocks])),
        "lossless": ("claimed" if "claimed" in checked else all(checked)) if checked else check.get("lossless"),
        "near_ties": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "p_value": check.get("p_value"),
        "tested_tokens": check.get("num_tokens"),
        "greedy_identical": check.get("greedy_identical", False),
        **{f"{part}_ms": 1e3 * sum(block[f"{part}_s"] for block in blocks) / steps for part in PARTS},
    }


def _intervals(blocks: Blocks) -> Record:
    """Estimate tau and the milliseconds of a step with intervals, and count the batches of prompts they are over."""
    steps, tau = [1e-3 * count for count in _sums(blocks, blocks, _steps)], tau_of(blocks)
    return {
        "samples": len(steps),
        "tau": None if tau is None else tau[0],
        "tau_interval": tau,
        "step_ms": sum_ratio(_sums(blocks, blocks, _decode_seconds), steps),
    }


def _compare(row: Record, rows: Sequence[Record], groups: Mapping[RowKey, Blocks]) -> None:
    """Add the ratios to plain decoding and to the fastest chain of the same suite and temperature."""
    at = row["suite"], row["temperature"]
    timed = [r for r in rows if (r["suite"], r["temperature"]) == at and r["status"] == "ok"]
    chains = [r for r in timed if r["method"].startswith("chain")]
    plain = next((r for r in timed if r["method"] == "plain"), None)
    chain = max(chains, key=lambda r: float(r["tokens_per_s"]), default=None)
    own = groups[*at, row["method"]]
    for name, base in (("over_plain", plain), ("over_chain", chain)):
        row[name] = None if base is None else _speedup(groups[*at, base["method"]], own)
    row["perfect_over_plain"] = None if plain is None else _perfect_speedup(groups[*at, "plain"], own, row)
    for name, seconds in (("step_over_plain", _decode_seconds), ("verify_over_plain", _verify_seconds)):
        has_steps = plain is not None and row["drafter"] not in PEERS
        row[name] = _step_ratio(groups[*at, "plain"], own, seconds) if has_steps else None


def _speedup(base: Blocks, other: Blocks) -> Ratio | None:
    """Compare over the prompts that both have run; each emits equally many tokens, so seconds a token compare."""
    both = base.keys() & other.keys()
    return sum_ratio(*(_sums(blocks, both, _seconds_a_token) for blocks in (base, other))) if both else None


def _perfect_speedup(plain: Blocks, own: Blocks, row: Record) -> float | None:
    """Speed over plain that the same steps, at the times that they took, would have if all that they draft was right.

    None where tau, or the time that reads the prompt, is not known.
    """
    both = plain.keys() & own.keys()
    if row["tau"] is None or not both or any(own[key]["ttft_s"] is None for key in both):
        return None
    prefill = [own[key]["ttft_s"] for key in both]
    decode = sum(sum(map(len, own[key]["tokens"][0])) / own[key]["p50"] for key in both) - sum(prefill)
    perfect = sum(prefill) + decode * row["tau"] / most_tokens(row)
    return float(sum(sum(map(len, plain[key]["tokens"][0])) / plain[key]["p50"] for key in both) / perfect)


def _step_ratio(plain: Blocks, other: Blocks, seconds: Callable[[Record], float]) -> Ratio | None:
    """Compare seconds of a step with those of a whole step of plain decoding, over the prompts that both have run."""
    both = plain.keys() & other.keys()
    if not both:
        return None
    samples = [_sums(other, both, seconds), _sums(other, both, _steps)]
    samples += [_sums(plain, both, _decode_seconds), _sums(plain, both, _steps)]
    return interval(_over_each, *samples)


def _over_each(a: Array, n: Array, b: Array, m: Array, axis: int) -> Array:
    """Divide a ratio of sums by another one."""
    return _over(a, n, axis) / _over(b, m, axis)


def _over(a: Array, b: Array, axis: int) -> Array:
    """Divide sums."""
    return np.asarray(a.sum(axis) / b.sum(axis))


def _sums(blocks: Blocks, keys: Iterable[tuple[Any, Any]], value: Callable[[Record], float]) -> list[float]:
    """Sum a value over turns and seeds of each batch of prompts: texts of one prompt are not independent."""
    sums: dict[Any, float] = defaultdict(float)
    for batch, text in sorted(keys):
        sums[batch] += value(blocks[batch, text])
    return list(sums.values())


def _seconds_a_token(block: Record) -> float:
    """Seconds in which each of a block's sequences emits one token, times their number."""
    return float(len(block["params"]["prompts"]) / block["p50"])


def _steps(block: Record) -> int:
    """Count a block's steps, one if there is none, as where one token is emitted."""
    return max(int(block["steps"]), 1)


def _decode_seconds(block: Record) -> float:
    """Seconds of a block's steps: without its prefill."""
    return float(sum(map(len, block["tokens"][0])) / block["p50"] - block["prefill_s"])


def _verify_seconds(block: Record) -> float:
    """Seconds of verification in a block's steps."""
    return float(block["verify_s"])
