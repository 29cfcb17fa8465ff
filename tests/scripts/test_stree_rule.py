"""The study of STree's rule: ours emits the target's distribution, the rule of sorted children does not."""

from __future__ import annotations

from benchmarks.studies.stree_rule import RULES, rows


def test_draw_order_is_exact_and_sorted_children_are_not() -> None:
    found = {row["rule"]: row for row in rows(4, 5, 3)}
    ours, theirs, match = (found[name] for name in RULES)
    assert max(ours["error_max"], match["error_max"]) < 1e-12
    assert theirs["error_mean"] > 0.1
    one = {row["rule"]: row for row in rows(4, 5, 1)}
    assert one[[*RULES][1]]["error_max"] < 1e-12, "one child has one order"
