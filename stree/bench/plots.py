"""The report's plots, as SVG text that stands in a page by itself."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stree.bench.measures import PARTS
from stree.bench.records import Record

__all__ = ["Plot", "plots_of"]

WIDTH, HEIGHT = 4.8, 3.4  # inches; a phone shows the page's column at about this size
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#9f6b53", "#787774")
# Text stays text; the salt makes equal figures equal files.
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "stree", "font.family": "sans-serif", "font.size": 10, "axes.grid": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": 9, "axes.axisbelow": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.

    Attributes:
        subject: what it shows; plots of one subject stand side by side.
        caption: of which run, and how to read it.
        svg: the picture.
    """

    subject: str
    caption: str
    svg: str


def plots_of(run: str, rows: Sequence[Record], records: Sequence[Record]) -> list[Plot]:
    """Draw everything that a run has figures for.

    Args:
        run: its name.
        rows: of ``stree.bench.summary.summarise``.
        records: the run's own, for step times and memory by nodes.
    """
    plots = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        timed = [row for row in rows if row["temperature"] == temperature and row["status"] == "ok"]
        if not timed:
            continue
        at = f"{run}, temperature {temperature:g}"
        if any(row["over_plain"] for row in timed if row["method"] != "plain"):
            plots.append(_speedup(timed, f"{at}. Tokens/s over plain decoding; bars are 95 % intervals over prompts."))
        pooled = _pooled(timed)
        # The baselines propose and accept what the tree does; only their time and memory differ.
        drafting = [r for r in pooled if r["drafter"] in ("model", "suffix", "fused") and r["engine"] == "tree"]
        if drafting:
            plots.append(_tau(drafting, f"{at}. Tokens a step against nodes verified a step, all suites together."))
        plots.append(_parts(pooled, f"{at}. Milliseconds a step by part, all suites together."))
        if any(row["by_depth"] for row in drafting):
            plots.append(_depths(drafting, f"{at}. Chance that a draft at a depth is accepted where its parent was."))
    for metric, unit, scale in (("step_latency", "ms a step", 1.0), ("state_bytes", "KiB", 1024.0)):
        lines = [r for r in records if r["metric"] == metric and r.get("status", "ok") == "ok"]
        if lines:
            plots.append(_engines(run, lines, unit, scale))
    return plots


def _draw(subject: str, caption: str, paint: Callable[[Any], None], height: float = HEIGHT) -> Plot:
    """Make a figure and turn it into SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(subject, caption, out.getvalue()[out.getvalue().index("<svg") :])


def _colour(place: int) -> str:
    """Choose a colour."""
    return COLOURS[place % len(COLOURS)]


def _speedup(rows: Sequence[Record], caption: str) -> Plot:
    """Speed-up by method and suite, with intervals."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "plain"))
    suites = list(dict.fromkeys(row["suite"] for row in rows))

    def paint(axes: Any) -> None:
        for number, suite in enumerate(suites):
            shift = 0.5 * ((number + 0.5) / len(suites) - 0.5)
            known = [r for r in rows if r["suite"] == suite and r["method"] in methods and r["over_plain"]]
            for label, row in zip([suite] + [None] * len(known), known, strict=False):
                value, low, high = row["over_plain"]
                bar = [[value - low], [high - value]] if low is not None else None
                place = methods.index(row["method"]) + shift
                axes.errorbar(value, place, xerr=bar, fmt="o", ms=4, color=_colour(number), label=label)
        axes.axvline(1.0, color="#444", lw=0.8)
        axes.set_yticks(range(len(methods)), methods)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s, times plain decoding")
        _legend(axes)

    return _draw("Speed-up by method and suite", caption, paint, max(HEIGHT, 1.2 + 0.27 * len(methods)))


def _pooled(rows: Sequence[Record]) -> list[Record]:
    """Average each method over suites."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        groups[row["method"]].append(row)
    pooled = []
    for method, of_method in groups.items():
        one: Record = {"method": method, **{name: of_method[0][name] for name in ("drafter", "engine")}}
        for name in ("tau", "verified", *(f"{part}_ms" for part in PARTS)):
            one[name] = sum(row[name] for row in of_method) / len(of_method)
        depths = [row["acceptance_by_depth"] for row in of_method]
        one["by_depth"] = []
        for place in range(max(map(len, depths))):
            known = [shares[place] for shares in depths if place < len(shares)]
            one["by_depth"].append(sum(known) / len(known))
        pooled.append(one)
    return pooled


def _tau(rows: Sequence[Record], caption: str) -> Plot:
    """Tau against nodes, a line a kind of method."""
    kinds: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        kinds[row["method"].split(":")[0]].append(row)

    def paint(axes: Any) -> None:
        for number, (kind, of_kind) in enumerate(kinds.items()):
            of_kind.sort(key=lambda row: row["verified"])
            xs, ys = [row["verified"] for row in of_kind], [row["tau"] for row in of_kind]
            axes.plot(xs, ys, "o-" if number < len(COLOURS) else "s--", ms=4, color=_colour(number), label=kind)
        axes.set_xlabel("nodes verified a step, root included")
        axes.set_ylabel("tau, tokens a step")
        _legend(axes)

    return _draw("Tokens a step against nodes", caption, paint)


def _parts(rows: Sequence[Record], caption: str) -> Plot:
    """Where a step's time goes."""
    known = [row for row in rows if row["drafter"] not in ("transformers", "mamba-ssm")]

    def paint(axes: Any) -> None:
        left = [0.0] * len(known)
        for number, part in enumerate(PARTS):
            widths = [row[f"{part}_ms"] for row in known]
            axes.barh([row["method"] for row in known], widths, left=left, color=_colour(number), label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms a step")
        _legend(axes)

    return _draw("Where a step's time goes", caption, paint, max(HEIGHT, 1.2 + 0.24 * len(known)))


def _depths(rows: Sequence[Record], caption: str) -> Plot:
    """Acceptance by depth."""
    known = [row for row in rows if row["by_depth"]]

    def paint(axes: Any) -> None:
        for number, row in enumerate(known):
            depths = range(1, 1 + len(row["by_depth"][:8]))
            style = ("o-", "s--", "^:")[number // len(COLOURS) % 3]
            axes.plot(depths, row["by_depth"][:8], style, ms=3, lw=1, color=_colour(number), label=row["method"])
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth")
        axes.set_ylabel("accepted")
        _legend(axes)

    return _draw("Acceptance by depth", caption, paint, HEIGHT + 0.1 * len(known))


def _engines(run: str, records: Iterable[Record], unit: str, scale: float) -> Plot:
    """Tree, unrolled and snapshot against nodes."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        lines[record["provider"]][record["params"]["nodes"]] = record["p50" if "p50" in record else "value"] / scale

    def paint(axes: Any) -> None:
        for number, (name, points) in enumerate(lines.items()):
            axes.plot(*zip(*sorted(points.items()), strict=True), "o-", ms=4, color=_colour(number), label=name)
        axes.set_xlabel("nodes of a binary tree, root included")
        axes.set_ylabel(unit)
        axes.set_yscale("log")
        _legend(axes)

    what = "Time of verify and commit" if unit.startswith("ms") else "State and stash, bytes in KiB"
    return _draw(f"{what} against nodes", f"{run}, batch 1. Logarithmic scale.", paint)


def _legend(axes: Any) -> None:
    """Put the legend below the plot, where it covers nothing."""
    axes.figure.legend(loc="outside lower center", ncols=3)
