"""Write the tables and plots of README.md and the pages in docs/ from the records in benchmarks/results.

Run: python -m benchmarks.studies.documents

A table stands between the lines ``<!-- table NAME -->`` and ``<!-- end -->``; ``TABLES`` has the names.  The plots are
those of ``stree bench report``.  Nothing is written where a record is missing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial

from benchmarks import ROOT
from benchmarks.evidence.parts import BATCHES
from benchmarks.studies import denoising, lookahead, overlap, stree_rule, verification
from stree.bench.drawing import svg
from stree.bench.methods import PEERS
from stree.bench.records import Record, read_lines
from stree.bench.report import load_runs, plots_of, with_form
from stree.bench.summary import PARTS
from stree.bench.tables import ratio_text, table
from stree.growth.sequoia import RATES

__all__ = ["DOCUMENTS", "PLOTS", "TABLES", "drawn", "filled"]

RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
PAGES = ("results", "results-models", "results-drafting", "methods")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in PAGES))
BLOCK = re.compile(r"(?<=<!-- table )([\w-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
HEADS = ("model", "mtp", "eagle3", "dflash")
SUITES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-Bench"}
DEFAULT_RATES = f"rates={'/'.join(f'{rate:g}' for rate in RATES)}"
HEADINGS = {  # of methods whose name alone does not say what they are
    "transformers-lookup:10": "transformers, prompt lookup",
    "transformers-assistant:4": "transformers, assistant",
}


def filled(text: str) -> str:
    """Return the text of a document with every table written from the records.

    Raises:
        ValueError: a table that is not known.
    """

    def block(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"tables are {', '.join(TABLES)}; got {found[1]}")
        return f"{found[1]} -->\n{TABLES[found[1]]()}\n"

    return BLOCK.sub(block, text)


def by_suite(run: str, cell: Callable[[Record], str]) -> str:
    """Show a run: a line for each suite and temperature, a column for each method unless all its cells are "-"."""
    (loaded,) = load_runs([RESULTS / run])
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for row in loaded.rows:
        at = lines.setdefault((row["suite"], row["temperature"]), {})
        at[row["method"]] = cell(row) if row["status"] == "ok" else row["status"]
    methods = [name for name in next(iter(lines.values())) if any(at[name] != "-" for at in lines.values())]
    names = ["plain, tokens/s" if name == "plain" and cell is speed else HEADINGS.get(name, name) for name in methods]
    rows = [[_suite(suite), f"{t:g}", *(at[name] for name in methods)] for (suite, t), at in lines.items()]
    return table(["prompts", "T", *names], rows)


def speed(row: Record) -> str:
    """Tokens a second of plain decoding; of another method, over plain decoding of the same prompts."""
    return f"{row['tokens_per_s']:.3g}" if row["method"] == "plain" else ratio_text(row["over_plain"])


def tau(row: Record) -> str:
    """Tokens a step."""
    return ratio_text(row["tau_interval"])


def parts(row: Record) -> str:
    """Milliseconds of the parts of a step; "-" for transformers, where they are not measured."""
    return "-" if row["drafter"] in PEERS else " / ".join(f"{row[f'{part}_ms']:.1f}" for part in PARTS)


def by_method(run: str) -> str:
    """Show a run, all suites together: a line for each method, tau, milliseconds of a step and speed at each T."""
    (loaded,) = load_runs([RESULTS / run])
    temperatures = loaded.config["temperatures"]
    titles = [f"{name}, T {t:g}" for t in temperatures for name in ("tau", "ms a step", "tokens/s over plain")]
    lines: dict[str, list[str]] = {}
    for row in loaded.pooled:
        cells = [tau(row), f"{row['step_ms'][0]:.1f}", ratio_text(row["over_plain"])]
        lines[row["method"]] = lines.get(row["method"], []) + cells
    return table(["method", *titles], [[name, *cells] for name, cells in lines.items()])


def by_tree() -> str:
    """Show the runs of growths at equal budgets, all suites together: tau, draft calls and nodes a step at each T."""
    runs = load_runs([RESULTS / "depth-and-typical", RESULTS / "baselines"])
    titles = [f"{name}, T {t:g}" for t in runs[0].config["temperatures"] for name in ("tau", "draft calls", "nodes")]
    lines: dict[str, list[str]] = {}
    for run in runs:
        own: dict[str, list[str]] = {}
        for row in sorted(run.pooled, key=lambda row: row["temperature"]):
            name = with_form(row).replace(DEFAULT_RATES, "rates of the default")
            figures = [tau(row), f"{row['draft_calls']:.1f}", f"{row['verified']:.1f}"]
            own[name] = own.get(name, []) + figures
        lines = {**own, **lines}
    return table(["method", *titles], [[name, *figures] for name, figures in lines.items()])


def by_rule() -> str:
    """Show what the rules for sampled siblings emit."""
    rows = _last_record("stree-rule/results.jsonl")["rows"]
    return table(stree_rule.TITLES, map(stree_rule.cells, rows))


def by_verification() -> str:
    """Show time and memory of the ways to verify a tree."""
    return table(verification.TITLES, map(verification.cells, read_lines(RESULTS / "verification" / "results.jsonl")))


def by_denoising() -> str:
    """Show the masked-diffusion drafter's tokens a step by denoising steps."""
    rows = [row for record in read_lines(RESULTS / "denoising" / "results.jsonl") for row in record["rows"]]
    return table(denoising.TITLES, map(denoising.cells, rows))


def by_window() -> str:
    """Show lookahead decoding's tokens a step by the sizes of its window."""
    return table(lookahead.TITLES, map(lookahead.cells, _last_record("lookahead/results.jsonl")["rows"]))


def by_overlap() -> str:
    """Show steps with and without drafting ahead."""
    return table(overlap.TITLES, map(overlap.cells, _last_record("overlap/results.jsonl")["rows"]))


def by_drafter() -> str:
    """Show the runs of draft heads: tau by suite and of all prompts, its ratio to the first method's, and times."""
    lines = []
    for run in load_runs([RESULTS / "heads" / name for name in HEADS]):
        first: dict[float, float] = {}
        for row in sorted(run.pooled, key=lambda row: row["temperature"]):
            method, temperature = row["method"], row["temperature"]
            taus = [r["tau"] for r in run.rows if (r["method"], r["temperature"]) == (method, temperature)]
            over = row["tau"] / first.setdefault(temperature, row["tau"])
            whole = sum(row[f"{part}_ms"] for part in PARTS)
            figures = [f"{one:.1f}" for one in (row["draft_calls"], row["draft_ms"], whole)]
            names = [run.name, method, f"{temperature:g}", " / ".join(f"{one:.2f}" for one in taus)]
            lines.append([*names, tau(row), f"{over:.2f}", *figures])
    titles = ["drafter", "method", "T", "tau by suite", "tau", "over the first", "draft calls", "draft ms", "step ms"]
    return table(titles, lines)


def by_batch() -> str:
    """Show the runs by batch size: a line for each size."""
    runs = load_runs([RESULTS / f"batch-{size}" for size in BATCHES])
    rows, methods = [], [row["method"] for row in runs[0].rows if row["method"] != "plain"]
    for size, run in zip(BATCHES, runs, strict=True):
        found = {row["method"]: row for row in run.rows}
        plain = found["plain"]["tokens_per_s"]
        ratios = [ratio_text(found[name]["over_plain"]) for name in methods]
        rows.append([size, f"{plain:.0f}", f"{1e3 * size / plain:.1f}", *ratios])
    return table(["batch", "plain, tokens/s", "plain, ms a token of one sequence", *methods], rows)


def by_rate() -> str:
    """Show the load by rate of arrivals: a line for each rate, latencies over those of plain decoding."""
    rows = _last_record("serving/arrivals.jsonl")["rows"]
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] != "plain"))
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        at = {row["budget"]: row for row in rows if row["rate"] == rate}
        plain = at["plain"]
        ratios = [ratio_text(at[name]["over_plain"]["latency_median_s"]) for name in budgets]
        figures = (plain["tokens_per_s"], 1e3 * plain["ttft_median_s"], 1e3 * plain["latency_median_s"])
        lines.append([f"{rate:g}", *(f"{value:.3g}" for value in figures), *ratios])
    titles = ["requests a second", "plain, tokens/s", "plain, ms to the first token", "plain, ms a token"]
    return table([*titles, *budgets], lines)


def by_position() -> str:
    """Show the loss of next tokens by position, with all tokens before and with the last ones only."""
    record = _last_record("positions/results.jsonl")
    spans = [span for span in record["nats"] if span in record["nats_short"]]
    names = {"nats": "all tokens before", "nats_short": "the last 512 to 1,024"}
    rows = [[name, *(f"{record[key][span]:.3f}" for span in spans)] for key, name in names.items()]
    return table(["context", *spans], rows)


def _last_record(name: str) -> Record:
    """Read the last record of a file.

    Raises:
        ValueError: it has none.
    """
    if not (records := read_lines(RESULTS / name)):
        raise ValueError(f"{name} holds no record; python -m benchmarks.evidence makes it")
    return records[-1]


def _suite(name: str) -> str:
    """Name a suite, a long one by its tokens."""
    return f"{int(name.rpartition('-')[2]):,} tokens" if name.startswith("long-") else SUITES[name]


SPEEDS = ("speed", "context", "smollm2", *(f"smollm2-{run}" for run in ("one-thread", "long", "head", "context")))
TABLES: dict[str, Callable[[], str]] = {  # by name
    **{run: partial(by_suite, run, speed) for run in SPEEDS},
    **{f"{run}-tau": partial(by_suite, run, tau) for run in ("speed", "context", "smollm2-head", "smollm2-context")},
    **{f"{run}-parts": partial(by_suite, run, parts) for run in ("speed", "context", "smollm2-context")},
    **{run: partial(by_method, run) for run in ("nodes", "smollm2-nodes", "smollm2-drafter")},
    "heads": by_drafter,
    "baselines": by_tree,
    "stree-rule": by_rule,
    "denoising": by_denoising,
    "lookahead": by_window,
    "overlap": by_overlap,
    "verification": by_verification,
    "positions": by_position,
    "batch": by_batch,
    "arrivals": by_rate,
}
FIGURES = {  # name of a file -> name of a plot, and its runs
    "speed": ("speed", ["speed"]),
    "tau-by-nodes": ("tau-by-nodes", ["nodes"]),
    "step-time-by-nodes": ("step-time-by-nodes", ["nodes"]),
    "batch": ("batch", [f"batch-{size}" for size in BATCHES]),
    "context": ("context", ["context"]),
    "smollm2-speed": ("speed", ["smollm2"]),
    "smollm2-tau-by-nodes": ("tau-by-nodes", ["smollm2-nodes"]),
    "smollm2-step-time-by-nodes": ("step-time-by-nodes", ["smollm2-nodes"]),
}


def drawn() -> dict[str, str]:
    """Draw every plot as SVG, by the name of its file; suites are named as in the tables."""
    plots = {}
    for name, (label, names) in FIGURES.items():
        runs = load_runs([RESULTS / run for run in names])
        for row in (row for run in runs for row in run.rows):
            row["suite"] = SUITES.get(row["suite"], row["suite"])
        (plots[name],) = (svg(figure) for figure, _ in plots_of(runs) if figure.get_label() == label)
    return plots


def main() -> None:
    """Write the tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    try:
        texts = {document: filled(document.read_text()) for document in DOCUMENTS}
        texts |= {PLOTS / f"{name}.svg": plot for name, plot in drawn().items()}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
