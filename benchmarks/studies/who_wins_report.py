"""Tables of the who-wins study, from its records alone: mean tau, and ratios with paired bootstrap intervals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import table
from stree.bench.records import Record, read
from stree.bench.summary import interval_text

__all__ = ["Key", "Temperature", "markdown", "read_temperatures"]

DEFAULT = "calibrated"
RESAMPLES = 5000

HEAD = """# Who wins: expected tokens a step

Written by `python -m benchmarks.studies.who_wins --write`; the script's docstring says how a figure is made. Bundled
pair, texts of the target alone, mean over contexts of the expected number of tokens that a step emits, the target's own
included. A size is nodes (root included) x most draft calls; `chain` is the chain of as many draft calls, block
verification; `@rejection` and `@match` are other verifiers of the same trees. Intervals are paired bootstraps over
prompts of all suites. "best growth" compares the default with the other growth of at most as many nodes and draft calls
that comes nearest to it, "best chain" with the chain of the best depth that so many nodes allow. Prompts 33-48 and
81-112 of every suite are left out: the default was fitted to and chosen on them.
"""


class Key(NamedTuple):
    """A method at a size, written "name NODESxCALLS"."""

    name: str
    nodes: int
    calls: int

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read a key."""
        name, size = text.split(" ")
        nodes, calls = map(int, size.split("x"))
        return cls(name, nodes, calls)

    @property
    def size(self) -> str:
        """Nodes and draft calls."""
        return f"{self.nodes}x{self.calls}"

    @property
    def is_other_growth(self) -> bool:
        """Whether it is a growth of a model's trees with its best verifier, and not the default."""
        return "@" not in self.name and self.name not in (DEFAULT, "suffix", "fused")

    def at(self, name: str) -> Key:
        """Another method at the same draft calls (a chain, which has a node a call) or at the same size."""
        if name.startswith("chain"):
            return Key(name, self.calls + 1, self.calls)
        if name == "stree":  # 13 nodes, the nearest size is 16
            return Key(name, 13 if self.nodes == 16 else 0, self.calls)
        return Key(name, self.nodes, 0 if name == "suffix" else self.calls)


class Temperature:
    """Mean tau of every prompt of all suites at one temperature.

    Args:
        records: of this temperature; of one batch of prompts, later records replace methods of earlier ones.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        blocks: dict[tuple[str, int], dict[str, list[float]]] = {}
        real: dict[tuple[str, int], dict[str, float]] = {}
        for record in records:
            place = record["params"]["suite"], record["params"]["batch"]
            blocks.setdefault(place, {}).update(record["tau"])
            if record["measured"]:
                real[place] = record["measured"]
        self.prompts = Counter[str]()
        found: dict[Key, list[float]] = {}
        for (suite, _), block in sorted(blocks.items()):
            self.prompts[suite] += len(next(iter(block.values())))
            for key, tau in block.items():
                found.setdefault(Key.parse(key), []).extend(tau)
        self.tau = {
            key: tau for key, tau in found.items() if len(tau) == self.prompts.total()
        }  # others cannot be paired
        self.measured: dict[str, list[float]] = {}  # tau of the real loop, one value a batch of prompts
        for block_tau in real.values():
            for name, value in block_tau.items():
                self.measured.setdefault(name, []).append(value)

    @cached_property
    def _means(self) -> dict[Key, Any]:
        """Mean tau of every method on the prompts, then on resamples of them, the same for all methods."""
        count = self.prompts.total()
        chosen = np.random.default_rng(0).multinomial(count, [1 / count] * count, RESAMPLES)
        weights = np.concatenate([np.ones((1, count)), chosen]) / count
        return {key: weights @ np.asarray(tau) for key, tau in self.tau.items()}

    def ratio(self, mine: Key, theirs: Key) -> tuple[float, float, float]:
        """Mean tau of the first over that of the second, with a percentile bootstrap over prompts."""
        ratios = self._means[mine] / self._means[theirs]
        low, high = np.quantile(ratios[1:], [0.025, 0.975])
        return float(ratios[0]), float(low), float(high)

    def best_chain(self, most_nodes: int) -> Key:
        """The chain of the greatest mean tau among those of so many nodes."""
        chains = [key for key in self.tau if key.name == "chain" and key.nodes <= most_nodes]
        return max(chains, key=lambda key: np.mean(self.tau[key]))

    def comparisons(self) -> Iterator[tuple[str, Key, Key]]:
        """Pairs of methods to compare: the question, and both sides."""
        for key in self.tau:
            if key.name == DEFAULT:
                smaller = [o for o in self.tau if o.is_other_growth and o.nodes <= key.nodes and o.calls <= key.calls]
                if smaller:
                    yield "best growth", key, min(smaller, key=lambda other: self.ratio(key, other)[1])
                yield "chain of equal calls", key, key.at("chain")
                yield "best chain", key, self.best_chain(key.nodes)
                yield "traversal or rejection", key, key.at(f"{DEFAULT}@rejection")
            elif key.name == "fused":
                yield from (("fused", key, key.at(part)) for part in (DEFAULT, "suffix"))

    def ratio_rows(self) -> Iterator[tuple[str, str, str]]:
        """Lines of the table of comparisons."""
        for question, mine, theirs in self.comparisons():
            if theirs in self.tau:
                what = f"{mine.name} {mine.size} / {theirs.name} {theirs.size}"
                yield question, what, interval_text(*self.ratio(mine, theirs))

    def tau_rows(self, sizes: Sequence[Key]) -> Iterator[list[str]]:
        """Lines of the table of mean tau: a line a method, a column a size."""
        chains = [self.best_chain(key.nodes) for key in sizes]
        yield ["best chain of so many nodes", *(f"{np.mean(self.tau[c]):.2f} (depth {c.calls})" for c in chains)]
        for name in sorted({key.name for key in self.tau}, key=lambda name: (name != DEFAULT, name)):
            at = [key.at(name) for key in sizes]
            yield [name, *(f"{np.mean(self.tau[key]):.2f}" if key in self.tau else "" for key in at)]


def read_temperatures(directory: Path) -> dict[float, Temperature]:
    """Read the records of a run, by temperature."""
    records = read(directory / "results.jsonl")
    known = sorted({record["params"]["temperature"] for record in records})
    return {t: Temperature([record for record in records if record["params"]["temperature"] == t]) for t in known}


def markdown(directory: Path) -> str:
    """Write the tables: mean tau by method and size, and ratios; empty where there is no record."""
    temperatures = read_temperatures(directory)
    if not temperatures:
        return ""
    parts = [HEAD]
    if (directory / "run.json").exists():
        config = json.loads((directory / "run.json").read_text(encoding="utf-8"))["config"]
        parts.append(f"Texts of {config['new_tokens']} tokens, a context at every {config['stride']}th.\n")
    for temperature, row in temperatures.items():
        sizes = sorted((key for key in row.tau if key.name == DEFAULT), key=lambda key: key[1:])
        counts = ", ".join(f"{suite} {count}" for suite, count in row.prompts.items())
        parts.append(f"## Temperature {temperature:g}\n\nPrompts: {counts}.\n")
        parts.append(table(["method", *(key.size for key in sizes)], row.tau_rows(sizes)) + "\n")
        if row.measured:
            real = ", ".join(f"{name} {np.mean(tau):.2f}" for name, tau in row.measured.items())
            parts.append(f"The real loop on the same prompts emits: {real}.\n")
        parts.append(table(["compared", "what", "ratio [95%]"], sorted(row.ratio_rows())) + "\n")
    return "\n".join(parts)
