"""Names of growths on the command line."""

from __future__ import annotations

import pytest

from stree import growth as growths
from stree.growth import Growth, parse_growth

NAMES: dict[str, Growth] = {
    "calibrated": growths.Calibrated(),
    "calibrated:3": growths.Calibrated(depth=3),
    "rsdc:3,2": growths.RSDC([3, 2]),
    "sequoia:3": growths.Sequoia(depth=3),
    "specinfer:3,2": growths.SpecInfer([3, 2]),
    "rsds:4,3": growths.RSDS(4, 3),
    "opt-tree:7": growths.OptTree(7),
    "eagle2:11+depth-stop": growths.DepthStop(growths.Eagle2(11)),
    "eagle2+depth-stop:-0.7": growths.DepthStop(growths.Eagle2(), -0.7),
    "calibrated+decision": growths.DecisionStop(growths.Calibrated()),
    "static:2,2+decision:0.3": growths.DecisionStop(growths.Static([2, 2]), 0.3),
    "chain:8+sure:0.4": growths.Chain(8, stop=growths.Confidence(0.4)),
}


@pytest.mark.parametrize("text", NAMES)
def test_every_growth_has_a_name(text: str) -> None:
    assert parse_growth(text) == NAMES[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rsds:4", "growth must be calibrated, .*, got 'rsds:4'"),
        ("calibrated:0", "growth 'calibrated:0' cannot be read: depth must be at least 1, got 0"),
        ("chain", "growth must be calibrated, .*, got 'chain'"),
        ("eagle2+never", r"growth must be .*, \+depth-stop\[:LOG\], .*, got 'eagle2\+never'"),
        ("eagle2+sure:0.4", r"growth 'eagle2\+sure:0.4' cannot be read: sure stops chains, got Eagle2"),
        ("chain:4+sure:2", r"cannot be read: least_prob must be in \[0, 1\], got 2.0"),
        ("chain:4+depth-stop:deep", r"growth 'chain:4\+depth-stop:deep' cannot be read"),
    ],
)
def test_a_name_of_no_growth_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_growth(text)
