"""Growths by the names that the command line uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stree.growth.beam import RSDS
from stree.growth.calibrated import Calibrated
from stree.growth.decision import DecisionStop
from stree.growth.dyspec import DySpec
from stree.growth.fixed import Chain, Static
from stree.growth.plan import Growth
from stree.growth.positional import RSDC, Sequoia, SpecInfer
from stree.growth.reranked import Eagle2, OptTree
from stree.growth.stops import Confidence, DepthStop

__all__ = ["parse_growth"]

PLAIN: dict[str, Callable[[], Growth]] = {
    "calibrated": Calibrated,
    "dyspec": DySpec,
    "dyspec-heap": lambda: DySpec(form="heap"),
    "sequoia": Sequoia,
    "opt-tree": OptTree,
    "eagle2": Eagle2,
    "stree": Static.stree,
}
OF_DEPTH: dict[str, Callable[[int], Growth]] = {
    "calibrated": Calibrated,
    "sequoia": Sequoia,
    "opt-tree": OptTree,
    "eagle2": Eagle2,
    "chain": Chain,
}
OF_WIDTHS: dict[str, Callable[[list[int]], Growth]] = {"static": Static, "rsdc": RSDC, "specinfer": SpecInfer}
STOPS = ("depth-stop", "decision", "sure")
KNOWN = (
    f"{', '.join(PLAIN)}, {', '.join(f'{name}:DEPTH' for name in OF_DEPTH)}, "
    f"{', '.join(f'{name}:WIDTH,WIDTH,...' for name in OF_WIDTHS)} or rsds:WIDTH,DEPTH, "
    "+depth-stop[:LOG], +decision[:SCORE], or +sure:PROB"
)


def parse_growth(text: str) -> Growth:
    """Read a growth as the command line names it: calibrated, dyspec-heap, eagle2:6, chain:4, static:3,2, rsds:4,3, ...

    A number behind a name is its depth, a list its widths by depth.  A stop rule follows a plus:
    ``eagle2+depth-stop``, ``calibrated+decision:0.3``, ``chain:8+sure:0.4``.

    Raises:
        ValueError: an unknown name, or numbers that are none.
    """
    shape, plus, stop = text.partition("+")
    name, _, rest = shape.partition(":")
    try:
        growth = _plain(name, rest)
        if growth is not None and plus:
            growth = _stopped(growth, stop)
    except ValueError as error:
        raise ValueError(f"growth {text!r} cannot be read: {error}") from error
    if growth is None:
        raise ValueError(f"growth must be {KNOWN}, got {text!r}")
    return growth


def _plain(name: str, rest: str) -> Growth | None:
    """Read a growth without a stop rule, or None where the name is unknown."""
    if not rest:
        return PLAIN[name]() if name in PLAIN else None
    numbers = [int(number) for number in rest.split(",")]
    if name in OF_WIDTHS:
        return OF_WIDTHS[name](numbers)
    if name in OF_DEPTH and len(numbers) == 1:
        return OF_DEPTH[name](numbers[0])
    return RSDS(*numbers) if name == "rsds" and len(numbers) == 2 else None


def _stopped(growth: Growth, text: str) -> Growth | None:
    """Add a stop rule, or give None where its name is unknown."""
    name, _, rest = text.partition(":")
    if name not in STOPS:
        return None
    if name == "sure":
        if not isinstance(growth, Chain):
            raise ValueError(f"sure stops chains, got {growth}")
        return replace(growth, stop=Confidence(least_prob=float(rest)))
    if name == "depth-stop":
        return DepthStop(growth, threshold=float(rest)) if rest else DepthStop(growth)
    return DecisionStop(growth, threshold=float(rest)) if rest else DecisionStop(growth)
