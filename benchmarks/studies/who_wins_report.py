"""Tables and bars of the who-wins study, from its records alone: ratios of mean tau with paired bootstrap intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stree.bench.records import Record, read
from stree.bench.summary import Ratio

__all__ = ["Results", "bars", "markdown"]

DEFAULT = "calibrated"
RESAMPLES = 5000
# What a bar asks of the lower end of an interval.
NO_LOSS = {"best": 0.98, "rejection": 0.995, "fused": 0.99}
OVER_CHAIN = {"16x4": 1.2, "16x6": 1.2, "32x6": 1.3, "64x6": 1.4}
# Papers' orders: a method, its base, the temperatures at which it is claimed, the sizes.
ORDERS = (
    ("rsdc@rejection", "chain@rejection", (0.6, 0.8, 1.0), ("16x4", "32x6", "64x6")),
    ("rsds@rejection", "chain@rejection", (0.6, 0.8, 1.0), ("16x4", "32x6", "64x6")),
    ("rsds@rejection", "rsdc@rejection", (0.6, 0.8, 1.0), ("16x4", "32x6", "64x6")),
    ("sequoia", "specinfer", (0.6, 0.8, 1.0), ("16x4", "32x6", "64x6")),
    ("sequoia", "chain", (0.0, 0.6, 0.8, 1.0), ("16x4", "32x6", "64x6")),
    ("dyspec", "sequoia", (0.0, 0.6), ("16x4", "32x6", "64x6")),
    ("opttree", "chain", (0.0,), ("16x4", "32x6", "64x6")),
    ("opttree", "sequoia", (0.0,), ("16x4", "32x6", "64x6")),
    ("eagle2", "chain", (0.0,), ("16x4", "32x6", "64x6")),
)


HEAD = """# Who wins: expected tokens a step

Written by `python -m benchmarks.studies.who_wins --write`, which says how a figure is made. Bundled pair, texts
of the target alone, mean over contexts of the expected number of tokens that a step emits, the target's own included. A
size is nodes (root included) x most draft calls; `chain` is the chain of as many draft calls, block verification;
`@rejection` and `@match` are other verifiers of the same trees. Intervals are paired bootstraps over prompts. A bar is
met where the interval excludes what it must, missed where it lies beyond, else open. "1 best" sets the default beside
the growth of at most as many nodes and draft calls that comes nearest to it. "2 best chain" sets it beside the chain of
the best depth that so many nodes allow; it is a bar for the default of the best depth, of no more draft calls than that
chain's. Prompts 33-48 and 81-112 of every suite are left out: the default was fitted to and chosen on them.
"""


@dataclass(frozen=True)
class Bar:
    """One comparison.

    Attributes:
        bar: which bar of the issue it belongs to.
        suite: or "all".
        temperature: of target and draft.
        what: the two sides.
        ratio: mean tau of the first over that of the second, and the ends of its interval.
        least: what the ratio must exclude falling below, or None.
    """

    bar: str
    suite: str
    temperature: float
    what: str
    ratio: Ratio
    least: float | None

    @property
    def verdict(self) -> str:
        """Say whether the interval excludes what it must, or the contrary, or neither."""
        _, low, high = self.ratio
        if self.least is None or low is None or high is None:
            return "-"
        return "met" if low >= self.least else "missed" if high < self.least else "open"


class Results:
    """Mean tau of every prompt, by row and method.

    Args:
        directory: holds results.jsonl.
    """

    def __init__(self, directory: Path) -> None:
        self.records = read(directory / "results.jsonl")
        blocks: dict[tuple[str, float, int], dict[str, list[float]]] = {}
        for record in self.records:
            params = record["params"]
            block = blocks.setdefault((params["suite"], params["temperature"], params["batch"]), {})
            block.update(record["tau"])
        suites = sorted({suite for suite, _, _ in blocks})
        self.rows: dict[tuple[str, float], dict[str, list[float]]] = {}
        for (suite, temperature, _), block in sorted(blocks.items()):
            for name in (suite, "all"):
                row = self.rows.setdefault((name, temperature), {})
                for key, tau in block.items():
                    row.setdefault(key, []).extend(tau)
        self.suites = [*suites, "all"] if len(suites) > 1 else suites
        real = {tuple(record["params"].values()): record["measured"] for record in self.records if record["measured"]}
        self.measured: dict[float, dict[str, list[float]]] = {}  # tau of the real loop, a value a batch of prompts
        for (_, temperature, _), found in real.items():
            for key, tau in found.items():
                self.measured.setdefault(temperature, {}).setdefault(key, []).append(tau)
        self.temperatures = sorted({temperature for _, temperature in self.rows})
        for row in self.rows.values():  # only what every prompt of the row has can be paired
            most = max(map(len, row.values()))
            for key in [key for key, tau in row.items() if len(tau) < most]:
                del row[key]
        self._means = {place: _resampled(row) for place, row in self.rows.items()}

    def ratio(self, suite: str, temperature: float, mine: str, theirs: str) -> Ratio | None:
        """Compare two methods by a percentile bootstrap over a row's prompts; None where one was not measured."""
        row = self.rows.get((suite, temperature), {})
        if mine not in row or theirs not in row:
            return None
        means = self._means[suite, temperature]
        ratios = means[mine] / means[theirs]
        low, high = np.quantile(ratios[1:], [0.025, 0.975])
        return float(ratios[0]), float(low), float(high)

    def best_chain(self, suite: str, temperature: float, most_nodes: int) -> str:
        """Name the chain of the greatest mean tau among those of so many nodes."""
        row = self.rows[suite, temperature]
        chains = [key for key in row if name_of(key) == "chain" and nodes_of(key) <= most_nodes]
        return max(chains, key=lambda key: np.mean(row[key]))


def _resampled(row: dict[str, list[float]]) -> dict[str, Any]:
    """Give every method's mean tau on a row's prompts, then on resamples of them, the same for all methods."""
    count = len(next(iter(row.values())))
    chosen = np.random.default_rng(0).multinomial(count, [1 / count] * count, RESAMPLES)
    weights = np.concatenate([np.ones((1, count)), chosen]) / count
    return {key: weights @ np.asarray(tau) for key, tau in row.items()}


def name_of(key: str) -> str:
    """Cut the size off."""
    return key.split(" ")[0]


def nodes_of(key: str) -> int:
    """Read the nodes of a method's key."""
    return int(key.split(" ")[1].split("x")[0])


def calls_of(key: str) -> int:
    """Read the most draft calls of a method's key."""
    return int(key.split("x")[1])


def is_growth(key: str) -> bool:
    """Tell whether it is a growth of the draft model's trees with its best verifier."""
    return "@" not in key and name_of(key) not in ("suffix", "fused")


def chain_of(name: str, size: str) -> str:
    """Name the chain of as many draft calls as a size has."""
    calls = int(size.split("x")[1])
    return f"{name} {calls + 1}x{calls}"


def comparisons(results: Results) -> Iterator[Bar]:
    """Make every comparison that the bars are about."""
    for suite in results.suites:
        for temperature in results.temperatures:
            row = results.rows.get((suite, temperature))
            if row is None:
                continue
            pairs = [*_best(results, suite, temperature, row), *_chains(results, suite, temperature, row)]
            pairs += [("3 traversal", key, f"{name_of(key)}@rejection {key.split(' ')[1]}", NO_LOSS["rejection"])
                      for key in row if is_growth(key) and name_of(key) != "chain"]  # fmt: skip
            for key in [key for key in row if name_of(key) == "fused"]:
                size = key.split(" ")[1]
                pairs += [("4 fused", key, part, NO_LOSS["fused"])
                          for part in (f"{DEFAULT} {size}", f"suffix {nodes_of(key)}x0")]  # fmt: skip
            for mine, base, temperatures, sizes in ORDERS:
                if temperature in temperatures:
                    pairs += [("5 orders", f"{mine} {size}", chain_of(base, size) if base.startswith("chain") else
                               f"{base} {size}", None) for size in sizes]  # fmt: skip
            for bar, one, other, least in pairs:
                ratio = results.ratio(suite, temperature, one, other)
                if ratio is not None:
                    yield Bar(bar, suite, temperature, f"{one} / {other}", ratio, least)


def _best(results: Results, suite: str, temperature: float, row: dict[str, list[float]]) -> list[tuple[Any, ...]]:
    """Pair the default with the growth at equal nodes and no more calls of which it is least sure to lose nothing."""
    pairs = []
    for key in [key for key in row if name_of(key) == DEFAULT]:
        others = [other for other in row if is_growth(other) and name_of(other) != DEFAULT
                  and nodes_of(other) <= nodes_of(key) and calls_of(other) <= calls_of(key)]  # fmt: skip
        ratios = {other: results.ratio(suite, temperature, key, other) for other in others}
        known = {other: ratio[1] for other, ratio in ratios.items() if ratio is not None and ratio[1] is not None}
        if known:
            pairs.append(("1 best", key, min(known, key=lambda other: known[other]), NO_LOSS["best"]))
    return pairs


def _chains(results: Results, suite: str, temperature: float, row: dict[str, list[float]]) -> list[tuple[Any, ...]]:
    """Pair the default with the chain of equal calls, and with the best chain of at most as many nodes.

    The latter is a bar for the default of the best depth among those of as many nodes and at most that chain's calls.
    """
    pairs: list[tuple[Any, ...]] = []
    mine = [key for key in row if name_of(key) == DEFAULT]
    for key in mine:
        size = key.split(" ")[1]
        pairs.append(("2 equal calls", key, chain_of("chain", size), OVER_CHAIN.get(size)))
        chain = results.best_chain(suite, temperature, nodes_of(key))
        rivals = [other for other in mine if nodes_of(other) == nodes_of(key) and calls_of(other) <= calls_of(chain)]
        is_tuned = key == max(rivals, key=lambda other: np.mean(row[other]), default=None)
        pairs.append(("2 best chain", key, chain, 1.0 if is_tuned else None))
    return pairs


def bars(directory: Path) -> Record:
    """Count verdicts by bar and suite."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for bar in comparisons(Results(directory)):
        counts = found.setdefault(bar.bar, {}).setdefault(bar.suite, {})
        counts[bar.verdict] = counts.get(bar.verdict, 0) + 1
    return {"bench": "who_wins", "bars": found}


def markdown(directory: Path) -> str:
    """Write the tables: mean tau by method and size, every comparison over all suites, verdicts by suite."""
    results = Results(directory)
    if not results.rows:
        return ""
    lines = [HEAD, *_texts(directory)]
    for temperature in results.temperatures:
        lines += [*_table(results, temperature), ""]
    whole = results.suites[-1]  # "all" where there are several
    lines += ["## Bars", "", "| bar | T | what | ratio [95%] | must exclude | verdict |",
              "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for bar in sorted(comparisons(results), key=lambda bar: (bar.bar, bar.temperature)):
        if bar.suite == whole:
            value, low, high = bar.ratio
            ends = "" if low is None else f" [{low:.3f}, {high:.3f}]"
            least = "" if bar.least is None else f"< {bar.least:g}"
            lines.append(
                f"| {bar.bar} | {bar.temperature:g} | {bar.what} | {value:.3f}{ends} | {least} | {bar.verdict} |"
            )
    lines += ["", "## Verdicts by suite", "", f"| bar | {' | '.join(results.suites)} |",
              f"| --- |{' --- |' * len(results.suites)}"]  # fmt: skip
    for name, by_suite in sorted(bars(directory)["bars"].items()):
        cells = [", ".join(f"{count} {verdict}" for verdict, count in sorted(by_suite.get(suite, {}).items())
                           if verdict != "-") for suite in results.suites]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _texts(directory: Path) -> list[str]:
    """Say how long the texts are, where the run has a record of its settings."""
    about = directory / "run.json"
    if not about.exists():
        return []
    config = json.loads(about.read_text(encoding="utf-8"))["config"]
    return [f"Texts of {config['new_tokens']} tokens, a context at every {config['stride']}th.", ""]


def _table(results: Results, temperature: float) -> list[str]:
    """Lay out one temperature over all its suites: a line a method, a column a size."""
    row = results.rows[results.suites[-1], temperature]
    prompts = {suite: len(next(iter(results.rows[suite, temperature].values())))
               for suite in results.suites if (suite, temperature) in results.rows}  # fmt: skip
    sizes = sorted({key.split(" ")[1] for key in row if name_of(key) == DEFAULT}, key=_order)
    lines = [f"## Temperature {temperature:g}", "",
             f"Prompts: {', '.join(f'{suite} {count}' for suite, count in prompts.items())}.", "",
             f"| method | {' | '.join(sizes)} |", f"| --- |{' --- |' * len(sizes)}"]  # fmt: skip
    best = [results.best_chain(results.suites[-1], temperature, int(size.split("x")[0])) for size in sizes]
    depths = [f"{np.mean(row[key]):.2f} (depth {key.split('x')[1]})" for key in best]
    lines.append(f"| best chain of at most as many nodes | {' | '.join(depths)} |")
    for name in sorted({name_of(key) for key in row}, key=lambda name: (name != DEFAULT, name)):
        keys = [chain_of(name, size) if name.startswith("chain") else f"{name} {size}" for size in sizes]
        if name == "suffix":
            keys = [f"{name} {size.split('x')[0]}x0" for size in sizes]
        if name == "stree":
            keys = [f"{name} 13x4" if size == "16x4" else "" for size in sizes]
        cells = [f"{np.mean(row[key]):.2f}" if key in row else "" for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    real = [f"{key} {np.mean(tau):.2f}" for key, tau in results.measured.get(temperature, {}).items()]
    return [*lines, "", f"The real loop on the same prompts emits: {', '.join(real)}."] if real else lines


def _order(size: str) -> tuple[int, ...]:
    """Sort by nodes, then by calls."""
    return tuple(map(int, size.split("x")))
