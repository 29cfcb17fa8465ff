"""The page in Chromium, driven by Playwright: of a server, and in a file.

Run: python -m pytest -m slow tests/serving/test_page_in_browser.py, with chromium on the path
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.http_served import KEY, PROMPT, Served
from helpers.page_texts import luminance, random_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
WAIT_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'stree[test]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """Open a window; at the end no script has failed, and nothing but the server was asked."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(WAIT_MS)
    problems, asked = list[str](), list[str]()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert [text for text in problems if not re.search("status of (401|503)|net::ERR_FAILED", text)] == []
    assert [url for url in asked if not url.startswith((f"{served.url}/", "data:", "blob:", "file:"))] == []


def opened(page: Page, served: Served, link: str = "", **fields: object) -> None:
    page.goto(f"{served.url}/{link}")
    page.get_by_label("API key").fill(KEY)
    for name, value in {"prompt": PROMPT, **fields}.items():
        page.locator(f"[name={name}]").fill(str(value))


def ended(page: Page) -> None:
    page.locator("#status", has_text="Done").wait_for()
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def figure(page: Page, name: str) -> list[str]:
    cells: list[str] = page.locator("#figures tr", has_text=name).locator("td").all_text_contents()
    return cells


def shown_step(page: Page) -> int:
    page.wait_for_timeout(60)  # a frame
    return int(page.locator("#step").input_value())


def from_file(page: Page, folder: Path, html: str) -> None:
    (folder / "page.html").write_text(html, encoding="utf-8")
    page.goto((folder / "page.html").as_uri())
    page.locator("#tree rect").first.wait_for()


def test_both_columns_have_the_targets_text_and_say_so(page: Page, served: Served) -> None:
    opened(page, served, max_tokens=32)
    page.get_by_role("button", name="Generate").click()
    ended(page)
    text = served.alone(PROMPT, max_new_tokens=32)
    assert [page.locator(f"#{name}").text_content() for name in ("trees", "plain")] == [PROMPT + text] * 2
    verdict = page.locator("#verdict").text_content() or ""
    assert verdict.startswith("Same text: yes, all 32 tokens.") and "times as fast" in verdict
    assert figure(page, "tokens a step")[1] == "1.00" and float(figure(page, "tokens a step")[0]) > 1
    counts = zip(*(map(int, figure(page, name)) for name in ("tokens after the first", "steps")), strict=True)
    means = [float(value) for value in figure(page, "tokens a step")]
    assert means == pytest.approx([tokens / steps for tokens, steps in counts], abs=0.006)
    with_prefill, without = figure(page, "tokens/s with prefill"), figure(page, "tokens/s without prefill")
    assert all(0 < float(one) <= float(other) for one, other in zip(with_prefill, without, strict=True))
    seconds = [float(value) for value in figure(page, "seconds of decoding")]
    assert [31 / spent for spent in seconds] == pytest.approx([float(value) for value in without], rel=0.1)


def test_steps_are_reached_by_slider_keys_and_words_and_saved(page: Page, served: Served) -> None:
    opened(page, served, max_tokens=32)
    page.keyboard.press("Enter")  # in the last field
    ended(page)
    last = int(page.locator("#step").get_attribute("max") or 0)
    assert shown_step(page) == last == int(figure(page, "steps")[0])
    page.locator("h1").click()
    page.keyboard.press("ArrowLeft")
    assert shown_step(page) == last - 1
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    assert shown_step(page) == last
    page.locator("#trees [data-step='2']").click()
    assert shown_step(page) == 2 and page.locator("#trees .current").get_attribute("data-step") == "2"
    accepted = page.locator("#tree g.accepted").count()
    assert f"{accepted} of " in (page.locator("#step-label").text_content() or "")
    page.locator("#tree g.bonus text").hover()
    assert "the target's own token, depth" in (page.locator("#node").text_content() or "")
    with page.expect_download() as svg:
        page.get_by_role("button", name="SVG").click()
    with page.expect_download() as run:
        page.get_by_role("button", name="JSON").click()
    drawing, record = Path(svg.value.path()).read_text(), json.loads(Path(run.value.path()).read_text())
    assert drawing.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in drawing and "var(" not in drawing
    assert [record[name]["settings"].get("budget") for name in ("trees", "plain")] == [None, 1]
    assert len(record["trees"]["steps"]) == last + 1 and KEY not in json.dumps(record)
    page.locator("#plain [data-step='3']").click()
    assert shown_step(page) == 3 and page.locator("#tree rect").count() == 2


def test_a_link_holds_prompt_and_settings_but_no_key(page: Page, served: Served) -> None:
    opened(page, served, prompt="One & two\nthree", temperature=0.5, top_p=0.9, top_k=7, seed=5, budget="off")
    link = page.get_by_role("link", name="Link to").get_attribute("href") or ""
    assert KEY.split()[-1] not in link
    page.goto("about:blank")
    opened(page, served, link, prompt="One & two\nthree")
    values = {name: page.locator(f"[name={name}]").input_value() for name in ("temperature", "top_p", "top_k", "seed")}
    assert values == {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "seed": "5"}
    page.locator("[name=prompt]").press("Control+Enter")
    ended(page)
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert figure(page, "tokens a step") == ["–", "1.00"] and page.locator("#verdict").text_content() == ""


def test_sampled_texts_are_not_called_the_same(page: Page, served: Served) -> None:
    opened(page, served, max_tokens=24, temperature=1.5, seed=2)
    page.keyboard.press("Enter")
    ended(page)
    assert "two draws from one distribution" in (page.locator("#verdict").text_content() or "")


def test_escape_stops_the_text_and_keeps_the_focus(page: Page, served: Served) -> None:
    opened(page, served, max_tokens=200)
    page.get_by_role("button", name="Generate").click()
    page.locator("#trees [data-step='2']").wait_for()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="Stopped.").wait_for()
    assert page.evaluate("document.activeElement.id") == "run"
    for _ in range(100):
        if not served.engine.stats["running"]:
            break
        page.wait_for_timeout(50)
    assert not served.engine.stats["running"]


def test_problems_are_told_in_words_and_no_speed_is_shown_before_the_server_is_ready(
    page: Page, served: Served
) -> None:
    opened(page, served, max_tokens=8)
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.locator("#status.problem", has_text="the API key is missing or wrong").wait_for()
    page.get_by_label("API key").fill(KEY)
    served.app.state.requests.is_draining = True
    try:
        page.keyboard.press("Enter")
        page.locator("#status", has_text="not ready").wait_for()
        assert figure(page, "tokens/s") == ["–"] * 4
    finally:
        served.app.state.requests.is_draining = False
    ended(page)
    page.route("**/demo/stream", lambda route: route.abort())
    page.keyboard.press("Enter")
    page.locator("#status.problem", has_text="cannot be reached").wait_for()
    page.unroute("**/demo/stream")
    begun = 'data: {"text": "a", "ids": [1], "tree": null, "prefill_s": 1, "decode_s": 0, "is_shared": false}\n\n'
    page.route("**/demo/stream", lambda route: route.fulfill(content_type="text/event-stream", body=begun))
    page.keyboard.press("Enter")
    page.locator("#status.problem", has_text="broke off after 1 token").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Page, served: Served, scheme: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page.emulate_media(color_scheme=scheme)
    opened(page, served, max_tokens=16)
    page.keyboard.press("Enter")
    ended(page)
    for width in (1280, 375):
        page.set_viewport_size({"width": width, "height": 800})
        found = axe.Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_of_nodes_have_contrast(page: Page, scheme: Any, tmp_path: Path) -> None:
    page.emulate_media(color_scheme=scheme)
    from_file(page, tmp_path, random_page(1, steps=1, nodes=24))
    pairs = page.evaluate("""() => [...document.querySelectorAll("#tree g > g")].map(box => [box.getAttribute("class"),
        getComputedStyle(box.querySelector("text")).fill, getComputedStyle(box.querySelector("rect")).fill])""")
    assert {"root", "refused", "bonus"} <= {kind.split()[0] for kind, _, _ in pairs}
    for kind, ink, box in pairs:
        low, high = sorted((luminance(ink), luminance(box)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, kind


@pytest.mark.parametrize("seed", range(3))
def test_edges_cross_neither_labels_nor_each_other(page: Page, seed: int, tmp_path: Path) -> None:
    from_file(page, tmp_path, random_page(seed, steps=1, nodes=64))
    boxes, edges, texts = page.evaluate("""() => {
        const of = (kind) => [...document.querySelectorAll(`#tree ${kind}`)];
        const placed = one => Object.values(one.getBoundingClientRect().toJSON()).slice(0, 4);
        const along = path => [...Array(21).keys()].map(part => {
            const point = path.getPointAtLength(path.getTotalLength() * part / 20);
            const {x, y} = point.matrixTransform(path.getScreenCTM());
            return [x, y];
        });
        return [of("rect").map(placed), of("path").map(along), of("text").map(placed)];
    }""")
    assert len(boxes) == len(edges) + 1 == 65
    for x, y, width, height in boxes:
        inside = [p for edge in edges for p in edge if x < p[0] < x + width and y + 1.5 < p[1] < y + height - 1.5]
        assert inside == []
        others = [b for b in boxes if b[1] == y and b[0] != x]
        assert all(b[0] >= x + width or b[0] + b[2] <= x for b in others)
    for box, text in zip(boxes, texts, strict=True):
        assert box[0] <= text[0] and text[0] + text[2] <= box[0] + box[2], "a label is cut"
    for one in edges:
        for other in edges:  # of one level: their order at the top is that at the bottom
            if one[0][1] == other[0][1] and one[0][0] < other[0][0]:
                assert one[-1][0] < other[-1][0]


def test_nodes_are_told_apart_by_shape_and_say_what_is_known_of_them(page: Page, tmp_path: Path) -> None:
    html = random_page(0, steps=1, nodes=24)
    (length,) = map(int, re.findall(r'"kept": (\d+)', html))
    assert length > 2
    from_file(page, tmp_path, html.replace(f'"kept": {length}', f'"kept": {length - 2}'))
    kinds = page.locator("#tree g > g").evaluate_all("boxes => boxes.map(box => box.classList[0])")
    counts = {kind: kinds.count(kind) for kind in ("root", "accepted", "refused", "beyond")}
    assert counts == {"root": 1, "accepted": length - 2, "refused": 24 - length, "beyond": 2}  # the last and the bonus
    shapes = page.locator("#tree g > g").evaluate_all("""boxes => boxes.map(box => {
        const {rx, strokeDasharray, strokeWidth} = getComputedStyle(box.querySelector("rect"));
        return [box.classList[0], box.classList[0] === "beyond" ? "" : rx, strokeDasharray, strokeWidth].join();
    })""")
    assert len(set(shapes)) == len(set(kinds))
    page.locator("#tree g.refused text").last.hover()
    said = r"refused, depth \d+, estimated chance of acceptance [\d.]+ % \([\d.]+ % if its parent is accepted\), "
    said += "draft probability 25 %"
    assert re.search(said, page.locator("#node").text_content() or "")
    page.locator("#tree g.accepted text").first.hover()
    found = page.locator("#node").text_content() or ""
    assert all(part in found for part in ("accepted, depth 1", "draft probability 25 %", "target's probability 50 %"))
    page.get_by_role("region", name="Token tree").focus()
    for _ in range(2):
        page.keyboard.press("ArrowUp")
    assert "the last token before the step, depth 0" in (page.locator("#node").text_content() or "")
    page.locator("#tree g.beyond text").first.hover()
    assert "not kept" in (page.locator("#node").text_content() or "")


def test_nothing_in_a_text_is_run_and_all_of_it_is_shown(page: Page, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=document.title='x'><script>document.title='x'</script>"
    html = random_page(5, steps=2, nodes=8, prompt=hostile).replace(" word1", hostile.replace("<", "\\u003c"))
    from_file(page, tmp_path, html)
    assert (page.locator("#trees").text_content() or "").startswith(f"{hostile}First{hostile}")
    assert page.title() == "stree: token trees" and page.locator("img").count() == 0
    labels = set(page.locator("#tree text").all_text_contents())
    assert not any(re.search(r"[\s\u202e]", label.removeprefix("✓ ").removeprefix("+ ")) for label in labels)


def test_a_long_text_is_drawn_within_a_frame(page: Page, tmp_path: Path) -> None:
    from_file(page, tmp_path, random_page(7, steps=900, nodes=64))
    assert int((figure(page, "tokens") or ["0"])[0]) > 4000
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    spent = page.evaluate("""() => {
        const times = [];
        for (let step = 100; step < 140; step++) {
            shown.step = step;
            const began = performance.now();
            showStep();
            document.body.getBoundingClientRect();
            times.push(performance.now() - began);
        }
        return times.sort((a, b) => a - b);
    }""")
    assert painted < 500 and spent[0] < 16, (painted, spent)
