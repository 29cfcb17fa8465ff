"""One growth of every kind, small enough for steps of two short texts; "none" is plain decoding."""

from __future__ import annotations

from stree.growth import (
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    DySpec,
    Eagle2,
    Growth,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
)

GROWTHS: dict[str, Growth | None] = {
    "none": None,
    "chain": Chain(3),
    "static": Static([2, 2]),
    "sequoia": Sequoia(depth=3),
    "dyspec": DySpec(depth=3),
    "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=3),
    "specinfer": SpecInfer([2, 2]),
    "rsds": RSDS(3, 3),
    "opt-tree": OptTree(depth=3),
    "eagle2": DepthStop(Eagle2(depth=3, beam=3), threshold=-2.0, layers=None),
    "decision": DecisionStop(Chain(3, stop=Confidence(0.02)), threshold=0.1),
}
