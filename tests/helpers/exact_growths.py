"""A small tree of every growth, for enumeration with every verifier.

``tests/verify/test_exact.py`` requires that no growth is left out.
"""

from __future__ import annotations

from stree import growth as growths
from stree.growth import Growth
from stree.verify import VERIFIERS

__all__ = ["GROWTHS", "RULES", "WAYS"]

GROWTHS: dict[str, tuple[Growth, int]] = {
    "chain": (growths.Chain(2), 3),
    "static": (growths.Static([1, 2]), 4),
    "parents": (growths.Static([-1, 0, 0, 2]), 4),
    "rsdc": (growths.RSDC([3]), 4),
    "sequoia": (growths.Sequoia(depth=2, rates=(0.5, 0.2)), 4),
    "dyspec": (growths.DySpec(depth=2, ranks=2), 4),
    "dyspec-by-heap": (growths.DySpec(form="heap"), 3),
    "calibrated": (growths.Calibrated(depth=2, ranks=2), 4),
    "specinfer": (growths.SpecInfer([1, 2]), 4),
    "rsds": (growths.RSDS(2, 2), 5),
    "opt-tree": (growths.OptTree(depth=2), 4),
    "eagle2": (growths.Eagle2(depth=2, beam=2), 4),
    "depth-stop": (growths.DepthStop(growths.DySpec(depth=2, ranks=2), threshold=-0.5, layers=None), 4),
    "decision-stop": (growths.DecisionStop(growths.Static([1, 2]), weights=[[[100.0, *[0.0] * 10, -60.0]]]), 4),
    "stopped": (growths.Stopped(growths.Static([1, 2]), growths.Confidence(0.5)), 4),
}
RULES = [name for name in VERIFIERS if name != "auto"]  # which is one of the others
WAYS = [(name, rule) for name in GROWTHS for rule in RULES if rule != "block" or name == "chain"]
