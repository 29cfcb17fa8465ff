"""Names of growths, as ``growth=``, ``--growth`` and the methods of ``stree bench run`` take them.

    calibrated  dyspec  sequoia  opt-tree  eagle2                  with  [:NODES[xDEPTH]][,OPTION=VALUE...]
    chain:DEPTH  static:WIDTH,...  rsdc:WIDTH,...  specinfer:WIDTH,...  rsds:WIDTH,DEPTH  stree
    lossy-target-init:WIDTH,DEPTH
    +sure:PROB  +depth-stop[:LOG]  +decision[:PROB]                stop rules, behind any of them
    +NAME[:NUMBER]                                                 likewise, of ``STOPS``

NODES counts the root and is the budget; DEPTH is the number of draft calls, at most.  A fixed shape has its own number
of nodes, and runs under any budget that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from stree.checks import check_counts
from stree.growth.base import Growth
from stree.growth.calibrated import Calibrated
from stree.growth.chain import Chain
from stree.growth.depth_stop import DepthStop
from stree.growth.dyspec import DySpec
from stree.growth.eagle2 import Eagle2
from stree.growth.mcsd import DecisionStop, TargetInit
from stree.growth.opt_tree import OptTree
from stree.growth.rsd import RSDC, RSDS
from stree.growth.sequoia import Sequoia
from stree.growth.specinfer import SpecInfer
from stree.growth.static import Static
from stree.growth.stops import STOPS, Stopped
from stree.growth_names import GROWTHS as FORMS

__all__ = ["GROWTHS", "NamedGrowth", "parse_growth", "sized_growth"]


@dataclass(frozen=True, slots=True)
class NamedGrowth:
    """What a name says.

    Attributes:
        growth: the shape of the trees.
        budget: nodes a step, root included, where the name sets it.
    """

    growth: Growth
    budget: int | None


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A shape whose number of nodes is fixed.

    Attributes:
        form: how it is written.
        count: how many numbers it has, or None for at least one.
        make: makes it from its numbers.
    """

    form: str
    count: int | None
    make: Callable[[list[int]], Growth]


# Classes that fill a budget; a frozen dataclass of your own may be entered under another name.
GROWTHS: dict[str, Any] = {
    "calibrated": Calibrated, "dyspec": DySpec, "sequoia": Sequoia, "opt-tree": OptTree, "eagle2": Eagle2
}  # fmt: skip
BUILT_IN = frozenset(GROWTHS)
FIXED = {
    "chain": _Fixed("chain:DEPTH", 1, lambda numbers: Chain(numbers[0])),
    "static": _Fixed("static:WIDTH,...", None, Static),
    "rsdc": _Fixed("rsdc:WIDTH,...", None, RSDC),
    "specinfer": _Fixed("specinfer:WIDTH,...", None, SpecInfer),
    "rsds": _Fixed("rsds:WIDTH,DEPTH", 2, lambda numbers: RSDS(*numbers)),
    "lossy-target-init": _Fixed("lossy-target-init:WIDTH,DEPTH", 2, lambda numbers: TargetInit(*numbers)),
    "stree": _Fixed("stree", 0, lambda _: Static.stree()),
}
GROWTH_STOPS: dict[str, Callable[..., Growth]] = {"decision": DecisionStop, "depth-stop": DepthStop}  # around a growth


def _rates(text: str) -> tuple[float, ...]:
    """Read rates as 0.6/0.1/0.05."""
    return tuple(map(float, text.split("/")))


# Fields of growths by their annotation, which is a class, or its name where annotations are strings.
KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("int", "int | None", "Optional[int]", "<class 'int'>"), ("an integer", int)),
    **dict.fromkeys(("float", "float | None", "Optional[float]", "<class 'float'>"), ("a number", float)),
    **dict.fromkeys(("str", "<class 'str'>"), ("a word", str)),
    "Sequence[float] | None": ("numbers with slashes between them", _rates),
}


def sized_growth(growth: Growth | str | None, budget: Any, default: Any = None) -> tuple[Growth | None, Any]:
    """Return growth and budget, where the growth may be a name, which may set the budget; ``default`` where none does.

    Raises:
        ValueError: a name that cannot be read, or one that sets another budget.
    """
    if not isinstance(growth, str):
        return growth, default if budget is None else budget
    named = parse_growth(growth)
    if budget is None:
        return named.growth, default if named.budget is None else named.budget
    if named.budget in (None, budget):
        return named.growth, budget
    hint = "leave one of them out"
    if "x" not in growth.split("+")[0].split(",")[0]:
        name, nodes = growth.split(":")[0], budget if isinstance(budget, int) else "NODES"
        hint += f"; for at most {named.budget} draft calls write '{name}:{nodes}x{named.budget}'"
    raise ValueError(f"growth {growth!r} sets a budget of {named.budget} nodes, and budget is {budget!r}: {hint}")


def parse_growth(text: str) -> NamedGrowth:
    """Read a name: calibrated:16x4, dyspec:32, eagle2:60x11+depth-stop, chain:8+sure:0.4, static:3,2, ...

    Raises:
        TypeError: no text.
        ValueError: an unknown name, or numbers and options that it does not take; the message lists what is known.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be the name of a growth, such as 'chain:4', got {text!r:.80}")
    shape, *stops = text.split("+")
    name, colon, rest = shape.partition(":")
    items = rest.split(",") if colon else []
    try:
        if name not in GROWTHS and name not in FIXED:
            hint = "; it is a budget" if name == "auto" else ""
            raise ValueError(f"no growth is named {name!r}{hint}")
        named = _dynamic(name, items) if name in GROWTHS else NamedGrowth(_fixed(FIXED[name], items), None)
        for stop in stops:
            named = replace(named, growth=_stopped(named.growth, stop))
    except (TypeError, ValueError) as error:
        own = sorted(GROWTHS.keys() - BUILT_IN)
        named_own = f"{', '.join(own)} (of your own), " if own else ""
        raise ValueError(f"growth {text!r} cannot be read: {error}; growths are {named_own}{FORMS}") from error
    return named


def _dynamic(name: str, items: list[str]) -> NamedGrowth:
    """Read the size and the options of a growth that fills a budget."""
    growth, budget = GROWTHS[name], None
    if not isinstance(growth, type):
        raise ValueError(f"GROWTHS[{name!r}] must be a class of growths, got {growth!r:.80}")
    options: dict[str, Any] = {}
    readers = {one.name: KINDS[str(one.type)] for one in fields(growth) if str(one.type) in KINDS}
    size = re.fullmatch(r"(\d+)(?:x(\d+))?", items[0]) if items else None
    if size:
        budget, items = int(size[1]), items[1:]
        check_counts(nodes=budget)
        options = {"depth": int(size[2])} if size[2] else {}
        if options and "depth" not in readers:
            raise ValueError(f"{name} has no field named depth, which NODESxDEPTH sets")
    for item in items:
        key, equals, value = item.partition("=")
        field = key.replace("-", "_")
        if not equals or field not in readers:
            names = ", ".join(readers).replace("_", "-")
            raise ValueError(f"{name} takes NODES or NODESxDEPTH, and the options {names}; got {item!r}")
        if field in options:
            raise ValueError(f"{key} is given twice")
        options[field] = _read(key, *readers[field], value)
    if growth is OptTree and "depth" in options:  # nodes x draft calls, as its paper compares trees
        options.setdefault("least_gain", 0.0)
    return NamedGrowth(growth(**options), budget)


def _fixed(shape: _Fixed, items: list[str]) -> Growth:
    """Read the numbers of a fixed shape."""
    is_complete = len(items) == shape.count if shape.count is not None else items
    if not is_complete or not all(item.isdecimal() for item in items):
        raise ValueError(f"it is written {shape.form}, with integers")
    return shape.make([int(item) for item in items])


def _stopped(growth: Growth, text: str) -> Growth:
    """Add a stop rule to a growth."""
    name, colon, rest = text.partition(":")
    if name not in GROWTH_STOPS and name not in STOPS:
        known = ", ".join(f"+{one}" for one in (*GROWTH_STOPS, *STOPS))
        raise ValueError(f"stop rules are {known}, got '+{name}'")
    if ":" in rest:
        raise ValueError(f"one number follows +{name}; nodes come before it, as in calibrated:32+decision:0.4")
    numbers = [_read(f"+{name}", "a number", float, rest)] if colon else []
    if name in GROWTH_STOPS:
        return GROWTH_STOPS[name](growth, *numbers)
    if name == "sure" and not any(numbers):
        hint = "; PROB is above 0" if numbers else ""
        raise ValueError(f"it is written +sure:PROB, got {text!r} behind {growth}{hint}")
    if not callable(STOPS[name]):
        raise ValueError(f"STOPS[{name!r}] must be a class of stop rules, got {STOPS[name]!r:.80}")
    rule = STOPS[name](*numbers)
    return replace(growth, stop=rule) if isinstance(growth, Chain) and growth.stop is None else Stopped(growth, rule)


def _read(name: str, kind: str, read: Callable[[str], Any], text: str) -> Any:
    """Read a value."""
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"{name} takes {kind}, got {text!r}") from None
