"""The methods that the who-wins study compares: growths, verifiers and drafters at their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from stree.growth import RSDC, RSDS, Calibrated, Chain, DySpec, Eagle2, Growth, OptTree, Sequoia, SpecInfer, Static

SIZES = ((4, 3), (8, 4), (16, 4), (32, 6), (64, 6))  # nodes, root included, and draft calls
# Sizes of the default alone.
DEEPER = ((8, 7), (16, 6), (16, 8), (16, 12), (16, 15), (32, 4), (32, 8), (32, 15), (64, 4), (64, 8), (64, 15))
FUSED = ((16, 4), (64, 6))
CHAINS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
# Children by depth: of trees that fit into a size, those that did best on other prompts.
WIDTHS = {8: (2, 1, 1), 16: (2, 2, 1, 1), 32: (5, 1, 1, 1, 1, 1), 64: (5, 2, 1, 1, 1, 1)}


@dataclass(frozen=True)
class Method:
    """One way to draft and verify.

    Attributes:
        name: in tables; the same at every size.
        nodes: budget, root included.
        calls: most draft calls.
        growth: bound to nothing yet, or None.
        drafter: "model", "suffix" or "fused".
        verifiers: those that judge its trees, the first of which is learnt from.
        cuts: depths at which a chain is judged besides, each a method of its own.
    """

    name: str
    nodes: int
    calls: int
    growth: Growth | None
    drafter: str = "model"
    verifiers: tuple[str, ...] = ("auto",)
    cuts: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Name it with its size."""
        return f"{self.name} {self.nodes}x{self.calls}"

    @property
    def first_key(self) -> str:
        """Name one of the figures that it gives."""
        return f"{self.name} {self.cuts[0] + 1}x{self.cuts[0]}" if self.cuts else self.key


def methods() -> list[Method]:
    """List every method at every size; temperature 0 has one verifier."""
    deepest = max(CHAINS)
    found = [Method("chain", deepest + 1, deepest, Chain(deepest), verifiers=("auto", "rejection"), cuts=CHAINS)]
    for nodes, calls in SIZES:
        found += [
            Method("calibrated", nodes, calls, Calibrated(calls), verifiers=("auto", "rejection", "match")),
            Method("dyspec", nodes, calls, DySpec(calls)),
            Method("sequoia", nodes, calls, Sequoia(calls)),
            Method("suffix", nodes, 0, None, "suffix"),
            Method("rsds", nodes, calls, RSDS((nodes - 1) // calls, calls), verifiers=("auto", "rejection")),
            Method("opttree", nodes, calls, OptTree(depth=calls)),
            Method("eagle2", nodes, calls, Eagle2(depth=calls)),
        ]
        if nodes in WIDTHS:
            found.append(Method("rsdc", nodes, calls, RSDC(WIDTHS[nodes]), verifiers=("auto", "rejection")))
            found.append(Method("specinfer", nodes, calls, SpecInfer(WIDTHS[nodes])))
    found += [Method("calibrated", nodes, calls, Calibrated(calls)) for nodes, calls in DEEPER]
    found += [Method("fused", nodes, calls, Calibrated(calls), "fused") for nodes, calls in FUSED]
    return [*found, Method("stree", 13, 4, Static.stree())]
