"""Growths by the names that the command line uses."""

from __future__ import annotations

from stree.growth.calibrated import Calibrated
from stree.growth.dyspec import DySpec
from stree.growth.fixed import Chain, Static
from stree.growth.plan import Growth
from stree.growth.positional import RSDC, Sequoia

__all__ = ["parse_growth"]


def parse_growth(text: str) -> Growth:
    """Read a growth as the command line names it: calibrated, dyspec, dyspec-heap, chain:4, static:3,2, stree.

    Also rsdc:3,2 and sequoia; ``calibrated:3`` and ``sequoia:3`` name the depth.

    Raises:
        ValueError: an unknown name, or numbers that are none.
    """
    name, _, rest = text.partition(":")
    try:
        numbers = [int(number) for number in rest.split(",")] if rest else []
        if name == "chain" and len(numbers) == 1:
            return Chain(numbers[0])
        if name == "calibrated" and len(numbers) == 1:
            return Calibrated(numbers[0])
        if name == "sequoia" and len(numbers) == 1:
            return Sequoia(numbers[0])
        if name == "rsdc" and numbers:
            return RSDC(numbers)
        if name == "static" and numbers:
            return Static(numbers)
    except ValueError as error:
        raise ValueError(f"growth {text!r} cannot be read: {error}") from error
    plain: dict[str, Growth] = {
        "calibrated": Calibrated(),
        "dyspec": DySpec(),
        "dyspec-heap": DySpec(form="heap"),
        "sequoia": Sequoia(),
        "stree": Static.stree(),
    }
    if text in plain:
        return plain[text]
    raise ValueError(
        "growth must be calibrated, dyspec, dyspec-heap, sequoia, calibrated:DEPTH, sequoia:DEPTH, chain:DEPTH, "
        f"static:WIDTH,WIDTH,..., rsdc:WIDTH,WIDTH,... or stree, got {text!r}"
    )
