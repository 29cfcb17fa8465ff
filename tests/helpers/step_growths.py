"""One growth of every kind, small enough for steps of two short texts; "none" is plain decoding."""

from __future__ import annotations

from stree import growth as growths
from stree.growth import Growth

GROWTHS: dict[str, Growth | None] = {
    "none": None,
    "chain": growths.Chain(3),
    "static": growths.Static([2, 2]),
    "sequoia": growths.Sequoia(depth=3),
    "dyspec": growths.DySpec(depth=3),
    "heap": growths.DySpec(form="heap"),
    "calibrated": growths.Calibrated(depth=3),
    "specinfer": growths.SpecInfer([2, 2]),
    "rsds": growths.RSDS(3, 3),
    "opt-tree": growths.OptTree(depth=3),
    "eagle2": growths.DepthStop(growths.Eagle2(depth=3, beam=3), threshold=-2.0, layers=None),
    "decision": growths.DecisionStop(growths.Chain(3, stop=growths.Confidence(0.02)), threshold=0.1),
}
