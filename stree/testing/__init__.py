"""Checks of drafters, growths, verifiers and model families, for their authors.

Every check enumerates in float64 what can happen over a small vocabulary, so it samples nothing, and raises
``CheckFailed`` with a report of where a distribution differs.  The project's own tests use the same enumeration.
"""

from stree.testing.drafting import check_drafter, check_growth
from stree.testing.family import check_family
from stree.testing.report import CheckFailed, Report
from stree.testing.tables import TableLM, TableModel, table_drafter
from stree.testing.verifiers import check_verifier

__all__ = [
    "CheckFailed", "Report", "TableLM", "TableModel", "check_drafter", "check_family", "check_growth",
    "check_verifier", "table_drafter",
]  # fmt: skip
