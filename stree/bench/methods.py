"""The methods that a run compares, by name; ``stree.bench.execute`` runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stree.checks import check_counts
from stree.drafters import DRAFTERS
from stree.growth import Chain, Growth, TargetInit, parse_growth
from stree.verify import VERIFIERS, ForcedLength, TypicalAcceptance, Verifier

__all__ = ["ASSISTED", "BASELINES", "DEFAULT", "PEERS", "Method", "parse_methods"]

DEFAULT = (
    "plain,transformers,mamba-ssm,chain:2-8,chain:4,chain:6,chain:15,stree,static:2,2,1,dyspec:8,dyspec:16,dyspec:32,"
    "calibrated:16,unrolled,suffix,fused,auto"
)
TOKENS = 10  # that transformers drafts a step, where a method's name does not say; its documentation's number
BUDGET = 16  # nodes of a dynamic tree whose name gives none, root included
ALONE: dict[str, tuple[str, int | str]] = {  # name -> drafter and budget
    "plain": ("none", 1),
    "transformers": ("transformers", 1),
    "mamba-ssm": ("mamba-ssm", 1),
    "auto": ("model", "auto"),
}
ASSISTED = ("transformers-lookup", "transformers-assistant")
PEERS = ("transformers", *ASSISTED, "mamba-ssm")
RETRIEVAL = ("suffix", "fused")
TYPICAL = "lossy-typical"
BASELINES = ("unrolled", "snapshot", "replay")  # other ways to verify a tree; ``stree.bench.execute`` has their models


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to generate.

    Attributes:
        name: as on the command line.
        drafter: "model", "fused", one of ``DRAFTERS``, or one of ``PEERS``, whose own generation runs.
        growth: shape of a draft model's trees, or None.
        budget: most nodes a step, root included, or "auto"; of a mode of transformers, one more than the tokens that it
            drafts a step.
        verifier: one of ``stree.verify.VERIFIERS``, or a rule that is not lossless.
        baseline: one of ``BASELINES`` in place of the library's verification of a tree, or None.
        depths: of a chain whose depth is still to be chosen; empty for all others.

    Raises:
        ValueError: a budget that holds no tree of the growth.
    """

    name: str
    drafter: str
    growth: Growth | None
    budget: int | str
    verifier: str | Verifier = "auto"
    baseline: str | None = None
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.budget, str):
            return
        try:
            check_counts(budget=self.budget)
            if self.growth is not None:
                self.growth.plan(self.budget)
        except ValueError as error:
            raise ValueError(f"method {self.name!r} cannot run: {error}") from error

    @property
    def kind(self) -> str:
        """The part of the name before the first colon, at sign or number sign."""
        return re.split("[:@#]", self.name)[0]

    @property
    def is_peer(self) -> bool:
        """Whether another library generates."""
        return self.drafter in PEERS

    @property
    def is_lossy(self) -> bool:
        """Whether its text does not follow the target's distribution: it is timed, and labelled lossy."""
        return isinstance(self.growth, TargetInit) or not isinstance(self.verifier, str)

    def with_acceptance_length(self, tokens: float) -> Method:
        """Force the tokens of a step, under another name; a method that drafts nothing here is returned unchanged."""
        if self.is_peer or self.drafter == "none":
            return self
        return replace(self, name=f"lossy-forced-{tokens:g}:{self.name}", verifier=ForcedLength(tokens))

    @property
    def is_deterministic(self) -> bool:
        """Whether its drafted tokens are chosen without random numbers (kind DELTA) at any temperature."""
        if self.growth is None:
            return self.drafter in ("none", "suffix")
        return not isinstance(self.budget, str) and self.growth.plan(self.budget).drawing == "top"

    def with_depth(self, depth: int) -> Method:
        """Make the chain of one depth, under this method's name."""
        return replace(self, growth=Chain(depth), budget=depth + 1, depths=())


def parse_methods(text: str, verifier: str = "auto") -> list[Method]:
    """Read a comma-separated list of methods.

    ``plain``; ``transformers`` and ``mamba-ssm``, those libraries' own generation; ``transformers-lookup[:TOKENS]`` and
    ``transformers-assistant[:TOKENS]``, transformers' prompt lookup, and its assisted generation with the drafter; any
    growth by the name that ``growth=`` takes (``stree.growth.names``), with 16 nodes where neither the name nor the
    shape says how many; ``chain:FROM-TO``, a chain whose depth is tuned on prompts that are not measured;
    ``suffix[:NODES]``, ``fused[:NODES]`` and any other name in ``stree.drafters.DRAFTERS``, likewise; ``auto``, the
    library's own choice; and baselines that verify the
    same tree in another way, ``unrolled[:GROWTH]`` its paths as rows of a batch, ``snapshot[:GROWTH]`` with a state for
    every node, ``replay[:GROWTH]`` with a second run over the accepted path; and ``lossy-typical[:GROWTH]``, Medusa's
    typical acceptance, which is not lossless.  ``@VERIFIER`` behind any of them chooses its verifier.

    Args:
        text: the list.
        verifier: of the methods that name none.

    A name that is given again is measured again, as NAME#2: two equal methods show what a machine's intervals mean.

    Raises:
        ValueError: an unknown method; the message lists the known ones.
    """
    methods: list[Method] = []
    for name in re.split(r",(?=[a-z])(?![a-z-]+=)", text.strip()):  # options of a growth have commas, too
        method = _parse(name, verifier)
        number = 1 + sum(other.name.partition("#")[0] == name for other in methods)
        methods.append(method if number == 1 else replace(method, name=f"{name}#{number}"))
    return methods


def _parse(name: str, verifier: str) -> Method:
    """Read one method."""
    rest, at, own = name.partition("@")
    if at:
        verifier = own
    if verifier not in VERIFIERS:
        raise ValueError(f"the verifier of {name!r} must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    kind, _, shape = rest.partition(":")
    if at and kind in (*PEERS, "lossy-target-init", TYPICAL):
        raise ValueError(f"method {name!r} has a rule of its own to accept tokens; leave @{own} out")
    if rest in ALONE:
        drafter, budget = ALONE[rest]
        return Method(name, drafter, None, budget, verifier)
    if kind in ASSISTED and re.fullmatch(r"\d*", shape):
        return Method(name, kind, None, int(shape or TOKENS) + 1, verifier)
    if (kind in RETRIEVAL or kind in DRAFTERS) and re.fullmatch(r"\d*", shape):
        return Method(name, kind, None, int(shape or BUDGET), verifier)
    chain = re.fullmatch(r"chain:(\d+)-(\d+)", rest)
    if chain:
        depths = tuple(range(int(chain[1]), int(chain[2]) + 1))
        if not depths or depths[0] < 1:
            raise ValueError(f"method {name!r} must go from a depth of at least 1 up")
        return Method(name, "model", Chain(depths[-1]), depths[-1] + 1, verifier, depths=depths)
    baseline, rule = kind if kind in BASELINES else None, TypicalAcceptance() if kind == TYPICAL else verifier
    try:
        named = parse_growth((shape or f"dyspec:{BUDGET}") if baseline or kind == TYPICAL else rest)
    except ValueError as error:
        known = ", ".join([*ALONE, *ASSISTED, *dict.fromkeys((*RETRIEVAL, *DRAFTERS)), *BASELINES, TYPICAL])
        raise ValueError(f"method {name!r} is unknown; known are {known}, and growths: {error}") from error
    budget = _nodes(named.growth) if named.budget is None else named.budget
    return Method(name, "model", named.growth, budget, rule, baseline)


def _nodes(growth: Growth) -> int:
    """Count the nodes of a fixed shape, root included; a dynamic growth gets the common budget."""
    for budget in (BUDGET, 64, 256, 1024):
        try:
            plan = growth.plan(budget)
        except ValueError:
            continue  # a fixed shape larger than this
        return plan.num_nodes + 1 if plan.is_fixed else BUDGET
    raise ValueError(f"a tree of {type(growth).__name__} has more than 1024 nodes")
