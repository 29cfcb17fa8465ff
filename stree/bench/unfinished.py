"""What a run was to measure and has not measured yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stree.bench.records import Record

__all__ = ["with_unfinished"]

Place = tuple[str, float]  # suite and temperature


def with_unfinished(rows: Sequence[Record], records: Sequence[Record], config: Mapping[str, Any]) -> list[Record]:
    """Mark rows that lack prompts, and add rows of status "unfinished" for methods that have none.

    Args:
        rows: of ``summarise``.
        records: of the run.
        config: of the run; one of an older version may not say what was to run.

    Returns:
        rows; where texts are missing with ``unfinished``, which says how many there are.
    """
    suites, temperatures = config.get("suites", {}), config.get("temperatures", ())
    texts: dict[tuple[str, float, str], set[tuple[int, int, int]]] = defaultdict(set)  # prompt, turn and seed
    for record in records:
        if record["metric"] in ("tokens_per_s", "skipped"):
            params = record["params"]
            name = "" if record["metric"] == "skipped" else record["provider"]
            turn = params["turn"] if "turns" in suites.get(params["suite"], ()) else 0  # else of an older version
            found = {(index, turn, params.get("seed", 0)) for index in params["prompts"]}
            texts[params["suite"], params["temperature"], name] |= found
    seeds = config.get("seed", 0)
    num_seeds = len(seeds) if isinstance(seeds, list) else 1
    methods = [name.rpartition(" (")[0] for name in config.get("methods", ())]
    known: dict[Place, list[Record]] = {(suite, t): [] for suite in suites for t in temperatures}
    for row in rows:
        known.setdefault((row["suite"], row["temperature"]), []).append(row)
    marked: list[Record] = []
    for (suite, temperature), there in known.items():
        for row in there:
            done = texts[suite, temperature, row["method"]]
            own = suites.get(suite, {"prompts": 0})
            total = own.get("turns", own["prompts"]) * (num_seeds if temperature else 1)
            total -= len(texts[suite, temperature, ""] - done)
            is_short = row["status"] == "ok" and len(done) < total
            marked.append({**row, "unfinished": f"{len(done)} of {total} texts"} if is_short else row)
        names = {row["method"] for row in there}
        place = {"suite": suite, "temperature": temperature, "status": "unfinished", "lossless": None}
        marked += [{**place, "method": name} for name in methods if name not in names]
    return marked
