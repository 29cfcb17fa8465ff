"""The page of `stree bench report` in Chromium, driven by Playwright.

Run: python -m pytest -m slow tests/bench/test_report_in_browser.py, with chromium on the path
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stree.bench.report import load_runs, write_page

RUN = Path(__file__).with_name("data_run")
CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_report_is_accessible_and_sorts_by_every_column(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'stree[test]'")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    write_page(load_runs([RUN]), tmp_path / "report.html")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page, problems, asked, places = browser.new_page(), list[str](), list[str](), list[float]()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        for scheme, width in (("light", 1280), ("dark", 375)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            violations = axe.Axe().run(page).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        heads, seen = page.locator("thead th"), set[tuple[float, ...]]()
        for index in range(0, heads.count(), 3):
            for direction in ("ascending", "descending"):
                heads.nth(index).locator("button").click()
                assert heads.nth(index).get_attribute("aria-sort") == direction
                values = numbers(page, index)
                assert values == sorted(values, reverse=direction == "descending")
            seen.add(tuple(values))
        assert len(seen) > 3, "columns have numbers"
        for left in (0, 400):  # the column of methods is never scrolled out at the left
            page.evaluate(f"document.querySelector('.scroll').scrollLeft = {left}")
            places.append(page.locator("td.method").first.evaluate("cell => cell.getBoundingClientRect().left"))
        browser.close()
    assert problems == [] and len(asked) == 1 and 0 < places[1] < places[0]


def numbers(page: Any, index: int) -> list[float]:
    """Return the numbers that the cells of a column begin with; empty ones come last."""
    script = f"rows => rows.map(row => parseFloat(row.cells[{index}].textContent))"
    cells = page.locator("tbody tr").evaluate_all(script)
    return [value for value in cells if value is not None and value == value]
