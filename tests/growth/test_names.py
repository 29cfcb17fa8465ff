"""Names of growths on the command line."""

from __future__ import annotations

import pytest

from stree.growth import (
    RSDC,
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    Eagle2,
    Growth,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
    parse_growth,
)


@pytest.mark.parametrize(
    ("text", "growth"),
    [
        ("calibrated", Calibrated()),
        ("calibrated:3", Calibrated(depth=3)),
        ("rsdc:3,2", RSDC([3, 2])),
        ("sequoia", Sequoia()),
        ("sequoia:3", Sequoia(depth=3)),
        ("specinfer:3,2", SpecInfer([3, 2])),
        ("rsds:4,3", RSDS(4, 3)),
        ("opt-tree", OptTree()),
        ("opt-tree:7", OptTree(7)),
        ("eagle2", Eagle2()),
        ("eagle2:5", Eagle2(5)),
        ("eagle2:11+depth-stop", DepthStop(Eagle2(11))),
        ("eagle2+depth-stop:-0.7", DepthStop(Eagle2(), -0.7)),
        ("calibrated+decision", DecisionStop(Calibrated())),
        ("static:2,2+decision:0.3", DecisionStop(Static([2, 2]), 0.3)),
        ("chain:8+sure:0.4", Chain(8, stop=Confidence(0.4))),
    ],
)
def test_every_growth_has_a_name(text: str, growth: Growth) -> None:
    assert parse_growth(text) == growth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rsds:4", "growth must be calibrated, .*, got 'rsds:4'"),
        ("calibrated:0", "growth 'calibrated:0' cannot be read: depth must be at least 1, got 0"),
        ("chain", "growth must be calibrated, .*, got 'chain'"),
        ("eagle2:1,2", "growth must be calibrated, .*, got 'eagle2:1,2'"),
        ("eagle2+never", r"growth must be .*, \+depth-stop\[:LOG\], .*, got 'eagle2\+never'"),
        ("eagle2+sure:0.4", r"growth 'eagle2\+sure:0.4' cannot be read: sure stops chains, got Eagle2"),
        ("chain:4+sure:2", r"cannot be read: least_prob must be in \[0, 1\], got 2.0"),
        ("chain:4+depth-stop:deep", r"growth 'chain:4\+depth-stop:deep' cannot be read"),
    ],
)
def test_a_name_of_no_growth_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_growth(text)
