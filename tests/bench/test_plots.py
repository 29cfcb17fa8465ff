"""Plots of known rows: dots, intervals, names and ticks that a reader sees; no plot is drawn without its rows."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.drawn_plots import Row, drawn, record, row, texts
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from stree.bench import drawing, plots
from stree.bench.report import load_runs, write_page, write_plots
from stree.bench.summary import compare, pool, summarise
from stree.cli import main


def dots(axes: Axes) -> dict[str, Any]:
    """Middle of every dot, by the words that it shows."""
    return {str(line.get_gid())[4:]: np.array(line.get_xydata())[0].tolist() for line in axes.lines if line.get_gid()}


def intervals(axes: Axes) -> list[Any]:
    """Ends of every interval."""
    return [np.array(line.get_xydata()).tolist() for line in axes.lines if line.get_alpha()]


def words(figure: Figure) -> list[set[str]]:
    """Words that are drawn in each panel."""
    shown = set(texts(figure))
    return [{text.get_text() for text in shown.intersection(axes.findobj(Text))} for axes in figure.axes]


def test_a_dot_of_speed_is_on_the_logarithmic_axis_within_its_interval() -> None:
    ratios = {"fast": 2.0, "slow": 0.5, "equal": 1.02}
    rows = [row("plain"), *(row(*of) for of in ratios.items()), row("once", 1.5, over_plain=(1.5, None, None))]
    figure = drawn(plots.speed(rows))
    (axes,) = figure.axes
    assert list(dots(axes)) == [
        "fast: 2 [1.8, 2.2]",
        "slow: 0.5 [0.45, 0.55]",
        "equal: 1.02 [0.918, 1.12]",
        "once: 1.5",
    ]
    assert list(dots(axes).values()) == [[2.0, 0], [0.5, 1], [1.02, 2], [1.5, 3]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fast", "slow", "equal", "once"]
    assert [text.get_text() for text in axes.texts] == ["2.00", "0.50", "1.02", "1.50"]
    assert axes.get_xscale() == "log" and {"0.5×", "plain", "2×"} <= words(figure)[0]
    assert intervals(axes) == [[[0.9 * r, y], [1.1 * r, y]] for y, r in enumerate(ratios.values())]
    colours = [line.get_color() for line in axes.lines if line.get_gid()]
    assert len(set(colours)) == 3 and colours[2] == colours[3], "faster, slower, undecided"


def test_no_difference_over_fewer_than_five_prompts_has_a_colour_and_tau_has_none() -> None:
    def colours(figure: Figure | None) -> set[str]:
        return {str(line.get_color()) for line in drawn(figure).axes[0].lines if line.get_gid()}

    ratios = {"fast": 2.0, "slow": 0.5}
    few, enough = ([row(*of, samples=n) for of in ratios.items()] for n in (4, 5))
    assert colours(plots.speed(few)) == {drawing.SOFT} and len(colours(plots.speed(enough))) == 2
    assert colours(plots.tau(enough)) == {drawing.SOFT}
    figure = drawn(plots.tau(enough))
    assert {"plain", "2"} <= words(figure)[0] and figure.get_label() == "tau"


def light(colour: str) -> Any:
    """Linear red, green and blue."""
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(linear: Any) -> Any:
    """CIE L*a*b* of linear red, green and blue (D65)."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear.clip(0, 1)
    f = np.cbrt(xyz / (0.9505, 1.0, 1.089))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


EYES = {  # linear colours as readers see them: Machado, Oliveira and Fernandes, 2009, severity 1
    "most": np.eye(3),
    "protan": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]]),
    "deutan": np.array([[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
}


@pytest.mark.parametrize("eye", EYES)
def test_lines_differ_in_colour_for_every_reader_and_in_their_markers(eye: str) -> None:
    for colours in (drawing.COLOURS, [drawing.ON_DARK[colour] for colour in drawing.COLOURS]):
        seen = [lab(EYES[eye] @ light(colour)) for colour in colours]
        assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 15
    green, brown = (lab(EYES["deutan"] @ light(colour)) for colour in ("#1a7f37", "#bc4c00"))
    assert np.linalg.norm(green - brown) < 30, "and the measure sees what such a reader does not"
    figure = drawn(plots.tau_by_nodes(by_nodes()))
    markers = {line.get_marker() for line in figure.axes[0].lines if line.get_gid()}
    assert len(markers) == 3 - 1 and len(drawing.MARKERS) == len(set(drawing.MARKERS)) == len(drawing.COLOURS)


def test_speed_has_a_panel_for_each_suite_and_temperature_on_one_scale() -> None:
    rows = [row("auto", 1.5, suite=s, temperature=t) for s in ("code", "chat", "maths") for t in (0.0, 0.8)]
    figure = drawn(plots.speed([*rows, row("slow", 0.25), row("wrong", 9.0, status="failed")]))
    assert [axes.get_title("left") for axes in figure.axes[:2]] == ["code, T 0 (n = 8)", "code, T 0.8 (n = 8)"]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    places = [axes.get_position() for axes in figure.axes]
    assert len({place.x0 for place in places}) == 2 and len({round(place.y0, 3) for place in places}) == 3
    assert "output differs, not shown" in words(figure)[0]
    assert not any(name.startswith("wrong") for name in dots(figure.axes[0]))


def by_nodes() -> list[Row]:
    chains = [row(f"chain:{depth}", 1 + 0.2 * depth, budget=depth + 1) for depth in (1, 3, 7)]
    trees = [row(f"calibrated:{nodes}", 1 + 0.1 * nodes, budget=nodes) for nodes in (4, 16, 64)]
    return [row("plain"), *chains, *trees, row("suffix"), row("dyspec:8", budget=8), row("fused:x", status="failed")]


@pytest.mark.parametrize("draw", [plots.tau_by_nodes, plots.step_time_by_nodes])
def test_lines_by_nodes_are_on_a_logarithmic_abscissa_and_a_linear_ordinate(draw: Any) -> None:
    figure = drawn(draw(by_nodes()))
    for axes, shown in zip(figure.axes, words(figure), strict=True):
        found = dots(axes)
        assert {name.partition(",")[0] for name in found} == {"plain", "chain", "calibrated"}, "no line of one point"
        (x, y), *others = (place for name, place in found.items() if name.startswith("calibrated"))
        assert [(u / x, v) for u, v in others] == [(4, pytest.approx(2.6)), (16, pytest.approx(7.4))] and y == 1.4
        assert x == pytest.approx(4, rel=0.1), "a little aside"
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear") and {"1", "4", "64"} <= shown
        assert all(u == v and low < high for (u, low), (v, high) in intervals(axes))
        labels = sorted(axes.texts, key=lambda text: Text.get_window_extent(text).y0)
        assert [text.get_text() for text in labels] == ["plain", "chain", "calibrated"]


def test_nodes_that_two_depths_share_are_two_lines() -> None:
    def names(rows: list[Row]) -> set[str]:
        return {text.get_text() for text in drawn(plots.tau_by_nodes(rows)).axes[0].texts}

    assert names([row(f"calibrated:{n}x{d}", budget=n) for n in (8, 16) for d in (2, 4)]) == {
        "calibrated:Nx2", "calibrated:Nx4"
    }  # fmt: skip
    assert names([row(f"calibrated:{n}x{d}", budget=n) for n, d in ((6, 2), (8, 3), (16, 4))]) == {"calibrated"}


def test_batch_sizes_are_compared_with_plain_at_the_same_size() -> None:
    pooled = {
        size: [row("plain", tokens_per_s=50.0 * size), row("auto", 2.0 / size, samples=8 // size)] for size in (4, 1, 2)
    }
    ratio, total = drawn(plots.batch(pooled)).axes
    assert {"auto, 1: 2 [1.8, 2.2]", "auto, 2: 1 [0.9, 1.1]", "auto, 4: 0.5 [0.45, 0.55]"} < dots(ratio).keys()
    assert {"plain, 1: 50", "plain, 2: 100", "plain, 4: 200"} < dots(total).keys()
    assert ratio.get_title("left").endswith("(n = 2 to 8)")
    assert not intervals(total) and len(intervals(ratio)) == 6


@pytest.mark.slow
def test_contexts_are_numbers_in_names_of_suites_and_five_lines_a_panel() -> None:
    methods = ("plain", *(f"chain:{depth}" for depth in range(1, 7)))
    rows = [
        row(m, 1 + n / 1000, suite=f"{s}-{n}") for s in ("book", "code") for n in (512, 2048, 8192) for m in methods
    ]
    figure = drawn(plots.context([*rows, row("plain", suite="humaneval")]))
    assert len(figure.axes) == 2 * 3 * 2, "two kinds of text, three quantities, two groups of lines"
    for axes, shown in zip(figure.axes, words(figure), strict=True):
        names = {name.partition(",")[0] for name in dots(axes)}
        assert len(names) <= 5 and "plain" in names and names == {text.get_text() for text in axes.texts}
        assert {"512", "2048", "8192"} <= shown


def test_a_plot_is_absent_where_its_rows_are() -> None:
    rows = [row("plain"), row("auto", over_plain=None), row("chain:4", over_plain=None, budget=5)]
    assert plots.speed(rows) is None, "no ratio"
    assert plots.tau_by_nodes(rows) is None and plots.step_time_by_nodes(rows) is None, "one size"
    without = [{**one, "step_over_plain": None, "verify_over_plain": None} for one in by_nodes()]
    assert plots.step_time_by_nodes(without) is None and plots.tau_by_nodes(without) is not None
    assert plots.batch({2: rows}) is None, "one batch size"
    assert plots.context([{**one, "suite": "long-512"} for one in rows]) is None, "one length"
    assert plots.context(rows) is None


def records() -> list[Row]:
    """Two suites of one prompt: plain has steps of 1 s, chain:1 10 steps of 1.5 s, chain:3 5 and 10 steps of 2 s."""
    plain = [record(suite, 0, "plain", 21.0, 20) for suite in ("a", "b")]
    one = [record(suite, 0, "chain:1", 16.0, 10) for suite in ("a", "b")]
    return [*plain, *one, record("a", 0, "chain:3", 11.0, 5), record("b", 0, "chain:3", 21.0, 10)]


def test_pooled_rows_are_over_the_prompts_of_all_suites() -> None:
    rows = {one["method"]: one for one in pool(records(), summarise(records()))}
    assert rows["chain:3"]["tau_interval"] == (pytest.approx(40 / 15), None, None) and rows["chain:3"]["samples"] == 2
    assert rows["chain:3"]["step_ms"] == (pytest.approx(2000.0), None, None), "prefill is no step"
    assert rows["chain:1"]["step_over_plain"][0] == pytest.approx(1.5)
    assert rows["chain:1"]["verify_over_plain"][0] == pytest.approx(0.5)
    assert rows["chain:3"]["over_plain"][0] == pytest.approx(42 / 32)
    wrong = records()
    wrong[-1]["lossless"], wrong[-1]["p_value"] = False, 0.0
    assert {one["method"] for one in pool(wrong, summarise(wrong))} == {"plain", "chain:1"}


def test_two_methods_are_compared_over_the_prompts_of_all_suites() -> None:
    (row,) = compare(records(), "chain:3", "chain:1")
    assert row["temperature"] == 0.0 and row["speed"][0] == pytest.approx(32 / 32)
    assert row["tau"] == (pytest.approx(20 / 15), None, None)
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


def test_acceptance_by_depth_has_a_line_for_each_method_that_drafts() -> None:
    rows = [row("plain", acceptance_by_depth=[]), row("chain:2", acceptance_by_depth=[0.75, 0.5])]
    (axes,) = drawn(plots.acceptance(rows)).axes
    assert dots(axes) == {"chain:2, 1: 0.75": [1.0, 0.75], "chain:2, 2: 0.5": [2.0, 0.5]}
    assert plots.acceptance(rows[:1]) is None


@pytest.mark.slow
def test_files_and_page_hold_the_plots_and_the_commands_of_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [save_run(tmp_path / f"batch-{size}", size) for size in (1, 2)]
    folder = tmp_path / "plots"
    assert main(["bench", "report", str(paths[0]), "--markdown", "--plots", str(folder)]) == 0
    names = {"speed.svg", "tau.svg", "tau-by-nodes.svg", "step-time-by-nodes.svg"}
    assert {path.name for path in folder.iterdir()} == names
    assert not (paths[0] / "report.html").exists() and "speed.svg" in capsys.readouterr().err
    written = write_plots(load_runs(paths), tmp_path / "both")
    assert {"speed-batch-1.svg", "speed-batch-2.svg", "batch.svg"} <= {path.name for path in written}
    for path in written:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "target tiny, float32, batch 1, 20 new tokens" in (folder / "speed.svg").read_text()
    assert "target tiny, float32, 20 new tokens" in (tmp_path / "both" / "batch.svg").read_text(), "batches differ"

    write_page(load_runs(paths), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    *_, batches = page.split("<figure>")
    for size in (1, 2):
        assert f"<code>stree bench run --batch-size {size} &lt;x&gt;</code>" in batches
    assert page.index("</table>") < page.index("<figure>")
    assert page.count("<figure>") == page.count("<svg ") == 2 * 4 + 1
