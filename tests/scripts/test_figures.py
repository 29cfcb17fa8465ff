"""The committed plots, and the tables of README.md and docs/results*.md, are those of the present records."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies import documents


@pytest.mark.slow
def test_the_committed_plots_are_those_of_the_records() -> None:
    committed = {path.stem: path.read_text() for path in documents.PLOTS.glob("*.svg")}
    assert committed == documents.drawn(), f"run python -m {documents.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_records(document: Path) -> None:
    text = document.read_text()
    assert documents.filled(text) == text, f"run python -m {documents.__name__}"


def test_every_table_stands_in_a_document() -> None:
    shown = {name for document in documents.DOCUMENTS for name in documents.BLOCK.findall(document.read_text())}
    assert shown == set(documents.TABLES)


def test_a_table_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="got nonsense"):
        documents.filled("<!-- table nonsense -->\n| a |\n<!-- end -->")


def test_nothing_is_written_where_a_record_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "page.md"
    document.write_text(page := "<!-- table positions -->\n<!-- end -->")
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    monkeypatch.setattr(documents, "DOCUMENTS", (document,))
    monkeypatch.setattr("sys.argv", ["documents"])
    with pytest.raises(SystemExit, match="2"):
        documents.main()
    assert document.read_text() == page
