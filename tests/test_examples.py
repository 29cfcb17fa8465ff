"""The examples run on the bundled pair; README's commands and code run; references to documents lead somewhere."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fast_cases import slow_unless

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted(path for area in ("docs", "benchmarks", "kernels", "stree") for path in (ROOT / area).rglob("*.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "path",
    slow_unless(lambda path: path.stem in ("generate", "own_growth", "own_priorities"), EXAMPLES),
    ids=lambda path: path.stem,
)
def test_an_example_runs_and_fits_on_one_screen(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))["main"](8)
    assert capsys.readouterr().out.strip()
    assert len(path.read_text().splitlines()) <= 60


def test_readme_is_short_and_names_its_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    for marker in ("<!-- generate -->", "<!-- test -->"):  # .ci/run reads the second one
        block = README.partition(marker)[2].lstrip("\n")
        assert block.startswith("```sh\npython3 -m venv .venv && "), marker


def test_the_python_of_readme_runs() -> None:
    text = "\n".join(blocks("python"))
    assert "tokens=128" in text
    exec(compile(text.replace("tokens=128", "tokens=8"), "README.md", "exec"), {})


def links() -> Iterator[tuple[Path, str]]:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if not target.startswith(("http", "#")):
                yield path, target


def test_links_between_documents_lead_somewhere() -> None:
    broken = [(path.name, link) for path, link in links() if not (path.parent / link.partition("#")[0]).exists()]
    assert not broken


def test_code_refers_to_documents_of_this_repository() -> None:
    files = [path for area in ("stree", "kernels", "models", "benchmarks") for path in (ROOT / area).rglob("*.py")]
    pattern = re.compile(r"\b(?:docs/\w+|(?:\w+/)*[A-Z]{4,})\.md\b")
    cited = {(path.name, name) for path in files for name in pattern.findall(path.read_text())}
    assert ("reference.py", "docs/maths.md") in cited
    assert not [(file, name) for file, name in cited if not (ROOT / name).exists()]


def test_documents_name_files_that_exist() -> None:
    pattern = re.compile(r"`((?:stree|kernels|models|tests|benchmarks|docs|examples)/[\w./-]+)`")
    named = {(path.name, name) for path in DOCUMENTS for name in pattern.findall(path.read_text())}
    assert ("architecture.md", "stree/decode/step.py") in named
    assert not [(document, name) for document, name in named if not (ROOT / name).exists()]
