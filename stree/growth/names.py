"""Names of growths on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stree.growth.base import Growth
from stree.growth.calibrated import Calibrated
from stree.growth.chain import Chain
from stree.growth.depth_stop import DepthStop
from stree.growth.dyspec import DySpec
from stree.growth.eagle2 import Eagle2
from stree.growth.mcsd import DecisionStop
from stree.growth.opt_tree import OptTree
from stree.growth.rsd import RSDC, RSDS
from stree.growth.sequoia import Sequoia
from stree.growth.specinfer import SpecInfer
from stree.growth.static import Static
from stree.growth.stops import Confidence

__all__ = ["parse_growth"]

BY_NAME: dict[str, Callable[[], Growth]] = {
    "calibrated": Calibrated,
    "dyspec": DySpec,
    "dyspec-heap": lambda: DySpec(form="heap"),
    "sequoia": Sequoia,
    "opt-tree": OptTree,
    "eagle2": Eagle2,
    "stree": Static.stree,
}
BY_DEPTH: dict[str, Callable[[int], Growth]] = {
    "calibrated": Calibrated,
    "sequoia": Sequoia,
    "opt-tree": OptTree,
    "eagle2": Eagle2,
    "chain": Chain,
}
BY_WIDTHS: dict[str, Callable[[list[int]], Growth]] = {"static": Static, "rsdc": RSDC, "specinfer": SpecInfer}
STOPS = ("depth-stop", "decision", "sure")
KNOWN = (
    f"{', '.join(BY_NAME)}, {', '.join(f'{name}:DEPTH' for name in BY_DEPTH)}, "
    f"{', '.join(f'{name}:WIDTH,WIDTH,...' for name in BY_WIDTHS)} or rsds:WIDTH,DEPTH, "
    "+depth-stop[:LOG], +decision[:SCORE], or +sure:PROB"
)


def parse_growth(text: str) -> Growth:
    """Parse the command line's name of a growth: calibrated, dyspec-heap, eagle2:6, chain:4, static:3,2, rsds:4,3, ...

    One number after the colon is the depth, a list the widths by depth.  A stop rule follows a plus:
    ``eagle2+depth-stop``, ``calibrated+decision:0.3``, ``chain:8+sure:0.4``.

    Raises:
        ValueError: an unknown name, or text that is not a number where one belongs.
    """
    shape, plus, stop = text.partition("+")
    name, _, rest = shape.partition(":")
    try:
        growth = _parse_shape(name, rest)
        if growth is not None and plus:
            growth = _add_stop(growth, stop)
    except ValueError as error:
        raise ValueError(f"growth {text!r} cannot be read: {error}") from error
    if growth is None:
        raise ValueError(f"growth must be {KNOWN}, got {text!r}")
    return growth


def _parse_shape(name: str, rest: str) -> Growth | None:
    """Parse a growth without a stop rule; None where the name is unknown."""
    if not rest:
        return BY_NAME[name]() if name in BY_NAME else None
    numbers = [int(number) for number in rest.split(",")]
    if name in BY_WIDTHS:
        return BY_WIDTHS[name](numbers)
    if name in BY_DEPTH and len(numbers) == 1:
        return BY_DEPTH[name](numbers[0])
    return RSDS(*numbers) if name == "rsds" and len(numbers) == 2 else None


def _add_stop(growth: Growth, text: str) -> Growth | None:
    """Add a stop rule to a growth; None where its name is unknown."""
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
