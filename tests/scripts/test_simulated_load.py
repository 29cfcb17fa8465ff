"""The study of simulated load: "auto" comes near the best fixed size, and the same loads give the same figures."""

from __future__ import annotations

from benchmarks.studies.simulated_load import records


def test_auto_is_near_the_best_fixed_size_where_trees_pay_and_where_they_do_not() -> None:
    found = records("1,6", loads=3)
    rows = {(row["machine"], row["rate"]): row for row in found[0]["rows"]}
    assert all(row["auto_over_best"] < 1.12 for row in rows.values())
    quiet, busy = (rows["cpu", rate]["latency_s"] for rate in (1.0, 6.0))
    assert quiet["tree:8"] < quiet["plain"] and busy["tree:8"] > busy["plain"], "no fixed size is the best at both"
    assert records("1,6", loads=3) == found
