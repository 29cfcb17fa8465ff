"""Plots of known rows: places follow the written scales, names are there, no plot is drawn without its rows."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stree.bench import plots
from stree.bench.plots import Figure
from stree.bench.report import load_runs, write_page, write_plots
from stree.bench.summary import compare, pool, summarise
from stree.bench.svg import WIDTH, Panel, sheet
from stree.cli import main

SVG = "{http://www.w3.org/2000/svg}"
Row = dict[str, Any]
Dots = dict[str, tuple[float, float]]  # words of a dot -> its middle


def row(method: str, value: float = 1.0, **own: Any) -> Row:
    """A row of ``summarise`` in which every quantity has one value, with an interval of a fifth around it."""
    ratio = (value, 0.9 * value, 1.1 * value)
    names = ("over_plain", "tau_interval", "step_over_plain", "verify_over_plain", "step_ms")
    known = {"suite": "code", "temperature": 0.0, "method": method, "status": "ok", "drafter": "model", "samples": 8}
    return {**known, "budget": 1, "tokens_per_s": 100 * value, **dict.fromkeys(names, ratio), **own}


def parsed(panel: Panel) -> ElementTree.Element:
    """A panel as the only one of a file."""
    group = ElementTree.fromstring(sheet([panel], 1, "title")).find(f"{SVG}g")
    assert group is not None
    return group


def words(panel: Panel) -> dict[str, tuple[float, float]]:
    """Place of every text, by its words."""
    return {str(e.text): (float(e.attrib["x"]), float(e.attrib["y"])) for e in parsed(panel).iter(f"{SVG}text")}


def dots(panel: Panel) -> Dots:
    """Middle of every dot, by the words that it shows."""
    found = parsed(panel).iter(f"{SVG}circle")
    return {str(e.findtext(f"{SVG}title")): (float(e.attrib["cx"]), float(e.attrib["cy"])) for e in found}


def whiskers(panel: Panel) -> list[list[tuple[float, float]]]:
    """Ends of every interval."""
    paths = [e.attrib["d"] for e in parsed(panel).iter(f"{SVG}path") if "stroke-opacity" in e.attrib]
    return [[tuple(map(float, end.split())) for end in path[1:].split("L")] for path in paths]  # type: ignore[misc]


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_a_dot_of_speed_is_on_the_logarithmic_axis_within_its_interval() -> None:
    rows = [
        row("plain"),
        row("fast", 2.0),
        row("slow", 0.5),
        row("equal", 1.02),
        row("once", 1.5, over_plain=(1.5, None, None)),
    ]
    figure = drawn(plots.speed(rows))
    (panel,), names = figure.panels, words(figure.panels[0])
    unit = names["2×"][0] - names["plain"][0]
    for (text, (x, y)), ratio in zip(dots(panel).items(), (2, 0.5, 1.02, 1.5), strict=True):
        assert x == pytest.approx(names["plain"][0] + unit * math.log2(ratio), abs=0.2)
        assert y + 4.5 == pytest.approx(names[text.partition(":")[0]][1]), "beside its name"
        assert f"{ratio:.2f}" in names
    middles = list(dots(panel).values())[:3]
    assert all(low[0] < x < high[0] for (low, high), (x, _) in zip(whiskers(panel), middles, strict=True))
    fills = [e.attrib["fill"] for e in parsed(panel).iter(f"{SVG}circle")]
    assert len(set(fills)) == 3 and fills[2] == fills[3], "faster, slower, undecided"
    assert "plain" not in {text.partition(":")[0] for text in dots(panel)}


def test_speed_has_a_panel_for_each_suite_and_temperature_on_one_scale() -> None:
    rows = [row("auto", 1.5, suite=s, temperature=t) for s in ("code", "chat", "maths") for t in (0.0, 0.8)]
    figure = drawn(plots.speed([*rows, row("slow", 0.25), row("wrong", 9.0, status="failed")]))
    assert [panel.title for panel in figure.panels[:2]] == [
        "code, T 0 (n = 8)",
        "code, T 0.8 (n = 8)",
    ]
    assert len(figure.panels) == 6 and figure.columns == 2
    assert len({words(panel)["1.5×"] for panel in figure.panels[1:]}) == 1
    text = sheet(figure.panels, figure.columns, "Speed", "conditions")
    assert {"wrong", "output differs, not shown"} <= words(figure.panels[0]).keys() and "wrong: 9" not in text
    assert "conditions" in text and "prefers-color-scheme: dark" in text
    moves = re.findall(r'translate\((\S+) (\S+)\)"', text)
    assert len({x for x, _ in moves}) == 2 and len({y for _, y in moves}) == 3


def by_nodes() -> list[Row]:
    chains = [row(f"chain:{depth}", 1 + 0.2 * depth, budget=depth + 1) for depth in (1, 3, 7)]
    trees = [row(f"calibrated:{nodes}", 1 + 0.1 * nodes, budget=nodes) for nodes in (4, 16, 64)]
    return [row("plain"), *chains, *trees, row("suffix"), row("dyspec:8", budget=8), row("fused:x", status="failed")]


@pytest.mark.parametrize("draw", [plots.tau_by_nodes, plots.step_time_by_nodes])
def test_lines_by_nodes_are_on_a_logarithmic_abscissa_and_a_linear_ordinate(draw: Any) -> None:
    for panel in drawn(draw(by_nodes())).panels:
        names, found = words(panel), dots(panel)
        assert {text.partition(",")[0] for text in found} == {"plain", "chain", "calibrated"}, "no line of one point"
        trees = [place for text, place in found.items() if text.startswith("calibrated")]
        for left, right in pairwise(trees):
            assert right[0] - left[0] == pytest.approx(names["64"][0] - names["16"][0], abs=0.2), "4, 16, 64 nodes"
        rise = [trees[0][1] - trees[1][1], trees[1][1] - trees[2][1]]
        assert rise[1] == pytest.approx(4 * rise[0], rel=0.02), "1.2 and 4.8 above"
        assert all(low[1] > high[1] and low[0] == high[0] for low, high in whiskers(panel))
        assert names["calibrated"][1] < names["chain"][1] < names["plain"][1]


def test_nodes_that_two_depths_share_are_two_lines() -> None:
    rows = [row(f"calibrated:{n}x{d}", budget=n) for n in (8, 16) for d in (2, 4)]
    (panel,) = drawn(plots.tau_by_nodes(rows)).panels
    assert {"calibrated:Nx2", "calibrated:Nx4"} <= words(panel).keys()
    growing = [row(f"calibrated:{n}x{d}", budget=n) for n, d in ((6, 2), (8, 3), (16, 4))]
    assert "calibrated" in words(drawn(plots.tau_by_nodes(growing)).panels[0])


def test_batch_sizes_are_compared_with_plain_at_the_same_size() -> None:
    pooled = {
        size: [row("plain", tokens_per_s=50.0 * size), row("auto", 2.0 / size, samples=8 // size)] for size in (4, 1, 2)
    }
    figure = drawn(plots.batch(pooled))
    ratio, total = figure.panels
    assert [text for text in dots(ratio) if text.startswith("auto")] == [
        "auto, 1: 2 [1.8, 2.2]",
        "auto, 2: 1 [0.9, 1.1]",
        "auto, 4: 0.5 [0.45, 0.55]",
    ]
    assert [text for text in dots(total) if text.startswith("plain")] == [
        "plain, 1: 50",
        "plain, 2: 100",
        "plain, 4: 200",
    ]
    assert ratio.title.endswith("(n = 2 to 8)")
    assert not whiskers(total) and len(whiskers(ratio)) == 6


def test_contexts_are_numbers_in_names_of_suites_and_five_lines_a_panel() -> None:
    methods = ("plain", *(f"chain:{depth}" for depth in range(1, 7)))
    rows = [
        row(m, 1 + n / 1000, suite=f"{s}-{n}") for s in ("book", "code") for n in (512, 2048, 8192) for m in methods
    ]
    figure = drawn(plots.context([*rows, row("plain", suite="humaneval")]))
    assert len(figure.panels) == 2 * 3 * 2, "two kinds of text, three quantities, two groups of lines"
    for panel in figure.panels:
        names = {text.partition(",")[0] for text in dots(panel)}
        assert len(names) <= 5 and "plain" in names
        assert {"512", "2048", "8192"} <= words(panel).keys()
        heights = sorted(y for name, (_, y) in words(panel).items() if name in names)
        assert all(below - above >= 14 for above, below in pairwise(heights)), "lines end together"
        assert all(x + 7 * len(name) <= WIDTH for name, (x, _) in words(panel).items() if name in names)


def test_a_plot_is_absent_where_its_rows_are() -> None:
    rows = [row("plain"), row("auto", over_plain=None), row("chain:4", over_plain=None, budget=5)]
    assert plots.speed(rows) is None, "no ratio"
    assert plots.tau_by_nodes(rows) is None and plots.step_time_by_nodes(rows) is None, "one size"
    without = [{**one, "step_over_plain": None, "verify_over_plain": None} for one in by_nodes()]
    assert plots.step_time_by_nodes(without) is None and plots.tau_by_nodes(without) is not None
    assert plots.batch({2: rows}) is None, "one batch size"
    assert plots.context([{**one, "suite": "long-512"} for one in rows]) is None, "one length"
    assert plots.context(rows) is None


def record(suite: str, batch: int, method: str, seconds: float, steps: int, **own: Any) -> Row:
    """A timed record of 20 tokens."""
    params = {"suite": suite, "batch": batch, "turn": 0, "temperature": 0.0, "prompts": [batch]}
    params |= {
        "drafter": "none" if method == "plain" else "model",
        "budget": {"plain": 1, "chain:1": 2, "chain:3": 4}[method],
    }
    times = {"prefill_s": 1.0, "draft_s": 0.0, "verify_s": 0.5 * steps, "accept_s": 0.0, "commit_s": 0.0}
    known = {"metric": "tokens_per_s", "provider": method, "params": params, "verifier": "greedy", "lossless": True}
    known |= {"draft_calls": 0, "verified": 1.0 * steps, "ttft_s": 1.0, "distinct_4grams": 1.0, "tokens": [[[0] * 20]]}
    return {**known, "p50": 20 / seconds, "steps": steps, "sequence_steps": steps, "tau": 20 / steps, **times, **own}


def records() -> list[Row]:
    """Two suites of one prompt: plain has steps of 1 s, chain:1 10 steps of 1.5 s, chain:3 5 and 10 steps of 2 s."""
    plain = [record(suite, 0, "plain", 21.0, 20) for suite in ("a", "b")]
    one = [record(suite, 0, "chain:1", 16.0, 10) for suite in ("a", "b")]
    return [*plain, *one, record("a", 0, "chain:3", 11.0, 5), record("b", 0, "chain:3", 21.0, 10)]


def test_pooled_rows_are_over_the_prompts_of_all_suites() -> None:
    rows = {one["method"]: one for one in pool(records(), summarise(records()))}
    assert rows["chain:3"]["tau_interval"] == pytest.approx((40 / 15, 2.0, 4.0)) and rows["chain:3"]["samples"] == 2
    assert rows["chain:3"]["step_ms"] == pytest.approx((2000.0, 2000.0, 2000.0)), "prefill is no step"
    assert rows["chain:1"]["step_over_plain"] == pytest.approx((1.5, 1.5, 1.5))
    assert rows["chain:1"]["verify_over_plain"] == pytest.approx((0.5, 0.5, 0.5))
    assert rows["chain:3"]["over_plain"][0] == pytest.approx(42 / 32)
    wrong = records()
    wrong[-1]["lossless"], wrong[-1]["p_value"] = False, 0.0
    assert {one["method"] for one in pool(wrong, summarise(wrong))} == {"plain", "chain:1"}


def test_two_methods_are_compared_over_the_prompts_of_all_suites() -> None:
    (row,) = compare(records(), "chain:3", "chain:1")
    assert row["temperature"] == 0.0 and row["speed"][0] == pytest.approx(32 / 32)
    assert row["tokens_per_step"] == pytest.approx((20 / 15, 1.0, 2.0))
    with pytest.raises(ValueError, match="the run has plain, chain:1, chain:3; got chain:2"):
        compare(records(), "chain:2", "plain")
    wrong = records()
    wrong[-1]["lossless"] = False
    with pytest.raises(ValueError, match="an output of chain:3 is not the target's"):
        compare(wrong, "chain:3", "plain")


def save_run(path: Path, batch_size: int) -> Path:
    """A run of ``records``."""
    config = {"target": "tiny", "dtype": "float32", "batch_size": batch_size, "max_new_tokens": 20}
    about = {"config": config, "sessions": [{"command": f"stree bench run --batch-size {batch_size} <x>"}]}
    path.mkdir()
    (path / "run.json").write_text(json.dumps(about))
    (path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records()))
    return path


def test_files_and_page_hold_the_plots_and_the_commands_of_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [save_run(tmp_path / f"batch-{size}", size) for size in (1, 2)]
    folder = tmp_path / "plots"
    assert main(["bench", "report", str(paths[0]), "--markdown", "--plots", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"speed.svg", "tau-by-nodes.svg", "step-time-by-nodes.svg"}
    assert not (paths[0] / "report.html").exists() and "speed.svg" in capsys.readouterr().err
    written = write_plots(load_runs(paths), tmp_path / "both")
    assert {"speed-batch-1.svg", "speed-batch-2.svg", "batch.svg"} <= {path.name for path in written}
    for path in written:
        assert ElementTree.parse(path).getroot().attrib["width"] in ("380", "788")
    assert "target tiny, float32, batch 1, 20 new tokens" in (folder / "speed.svg").read_text()
    assert "target tiny, float32, 20 new tokens" in (tmp_path / "both" / "batch.svg").read_text(), "batches differ"

    write_page(load_runs(paths), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    *_, batches = page.split("<figure>")
    for size in (1, 2):
        assert f"<code>stree bench run --batch-size {size} &lt;x&gt;</code>" in batches
    assert page.index("</table>") < page.index("<figure>") and page.count("<figure>") == 2 * 3 + 1
    assert page.count('<svg class="plot"') == 2 * (2 + 1 + 2) + 2
    assert "prefers-color-scheme: dark" in page and "http" not in page


def test_a_long_name_is_cut_within_the_panel() -> None:
    name = f"unrolled:static:{','.join('2' * 40)}"
    (panel,) = drawn(plots.speed([row(name, 1.2)])).panels
    (shown,) = (text for text in words(panel) if text.startswith("unrolled"))
    assert shown.endswith("…") and 7 * len(shown) < min(x for (x, _), _ in whiskers(panel))
    assert f"{name}: 1.2 [1.08, 1.32]" in dots(panel)
