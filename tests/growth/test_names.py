"""The grammar of growth names, which ``generate``, the command line and ``stree bench`` share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stree import growth as growths
from stree.bench.methods import parse_methods
from stree.growth import STOPS, NamedGrowth, parse_growth, sized_growth
from stree.growth.names import FIXED, GROWTH_STOPS, GROWTHS
from stree.growth_names import GROWTHS as FORMS

NAMES: dict[str, tuple[growths.Growth, int | None]] = {
    "calibrated": (growths.Calibrated(), None),
    "calibrated:16": (growths.Calibrated(), 16),
    "calibrated:16x4": (growths.Calibrated(depth=4), 16),
    "calibrated:16x4,ranks=3": (growths.Calibrated(4, 3), 16),
    "calibrated:depth=6": (growths.Calibrated(depth=6), None),
    "dyspec:64,form=heap": (growths.DySpec(form="heap"), 64),
    "dyspec:16x4,form=heap": (growths.DySpec(depth=4, form="heap"), 16),
    "dyspec:threshold=0.1,width=3": (growths.DySpec(threshold=0.1, width=3), None),
    "sequoia:32x6,rates=0.6/0.2/0.1": (growths.Sequoia(6, (0.6, 0.2, 0.1)), 32),
    "opt-tree:60": (growths.OptTree(), 60),
    "opt-tree:60x10": (growths.OptTree(10, least_gain=0), 60),
    "opt-tree:60x10,least-gain=0.2": (growths.OptTree(10, least_gain=0.2), 60),
    "eagle2:60x6,beam=8": (growths.Eagle2(6, 8), 60),
    "rsdc:3,2": (growths.RSDC([3, 2]), None),
    "specinfer:3,2": (growths.SpecInfer([3, 2]), None),
    "rsds:4,3": (growths.RSDS(4, 3), None),
    "stree": (growths.Static.stree(), None),
    "lossy-target-init:2,5": (growths.TargetInit(2, 5), None),
    "eagle2:60x11+depth-stop": (growths.DepthStop(growths.Eagle2(11)), 60),
    "eagle2+depth-stop:-0.7": (growths.DepthStop(growths.Eagle2(), -0.7), None),
    "calibrated:32+decision:1": (growths.DecisionStop(growths.Calibrated(), 1.0), 32),
    "static:2,2+decision:0.3": (growths.DecisionStop(growths.Static([2, 2]), 0.3), None),
    "chain:8+sure:0.4": (growths.Chain(8, stop=growths.Confidence(0.4)), None),
    "dyspec:16+sure:0.3": (growths.Stopped(growths.DySpec(), growths.Confidence(0.3)), 16),
    "chain:8+sure:0.4+decision": (growths.DecisionStop(growths.Chain(8, stop=growths.Confidence(0.4))), None),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_one_growth_and_one_budget_wherever_it_is_read(text: str) -> None:
    growth, budget = NAMES[text]
    assert parse_growth(text) == NamedGrowth(growth, budget)
    assert sized_growth(text, None) == (growth, budget)
    before, method, after = parse_methods(f"plain,{text},suffix")
    assert (before.name, method.name, after.name) == ("plain", text, "suffix")
    assert method.growth == growth and (budget is None or method.budget == budget)


def test_the_help_names_every_growth_and_stop_rule() -> None:
    named = re.findall(r"\+?[a-z][a-z0-9-]*", FORMS)
    assert {*GROWTHS, *FIXED, *(f"+{stop}" for stop in {*STOPS, *GROWTH_STOPS})} <= {*named}


@pytest.mark.parametrize(
    ("text", "budget", "message"),
    [
        ("calibrated:16x4", 8, "growth 'calibrated:16x4' sets a budget of 16 nodes, and budget is 8: leave one of"),
        ("calibrated:16", "auto", "sets a budget of 16 nodes, and budget is 'auto'"),
        # What a number meant in ``growth=`` before.
        ("eagle2:6", 32, "sets a budget of 6 nodes, .*; for at most 6 draft calls write 'eagle2:32x6'"),
        ("sequoia:3+decision", None, None),
    ],
)
def test_a_budget_beside_a_name_must_be_the_name_s(text: str, budget: Any, message: str | None) -> None:
    if message is None:
        assert sized_growth(text, 3)[1] == sized_growth(text, None)[1] == 3
        return
    with pytest.raises(ValueError, match=message):
        sized_growth(text, budget)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "oak:4",
            "growth 'oak:4' cannot be read: no growth is named 'oak'; growths are calibrated, dyspec, .*sure:PROB",
        ),
        ("calibrated:0", "nodes must be at least 1, got 0"),
        ("calibrated:16x0", "depth must be at least 1, got 0"),
        ("calibrated:", "calibrated takes NODES or NODESxDEPTH, and the options depth, ranks; got ''"),
        ("calibrated:16,beam=3", "the options depth, ranks; got 'beam=3'"),
        ("calibrated:16x4,depth=5", "depth is given twice"),
        ("calibrated:16,ranks=1.5", "ranks takes an integer, got '1.5'"),
        ("dyspec:16,form=beam", "form must be one of layers, threshold, heap, got 'beam'"),
        ("opt-tree:60,least-gain=much", "least-gain takes a number, got 'much'"),
        ("sequoia:16,rates=0.6,0.1", "options depth, rates, source; got '0.1'"),
        ("chain", "it is written chain:DEPTH, with integers"),
        ("chain:2-8", "it is written chain:DEPTH"),
        ("chain:4,3", "it is written chain:DEPTH"),
        ("chain:4,stop=1", "it is written chain:DEPTH"),
        ("static:", "it is written static:WIDTH,..."),
        ("rsds:4", "it is written rsds:WIDTH,DEPTH"),
        ("stree:13", "it is written stree"),
        ("eagle2+never", r"stop rules are \+decision, \+depth-stop, \+sure, got '\+never'"),
        ("chain:4+sure", r"it is written \+sure:PROB, got 'sure' behind Chain"),
        ("chain:4+sure:0", r"it is written \+sure:PROB, got 'sure:0' behind Chain.*; PROB is above 0"),
        ("chain:4+sure:2", r"least_prob must be in \[0, 1\], got 2.0"),
        ("chain:4+depth-stop:deep", r"\+depth-stop takes a number, got 'deep'"),
        ("lossy-target-init:2,5+decision", "TargetInit takes no stop rule"),
        # Names of earlier versions.
        ("calibrated+decision:1:32", r"nodes come before it, as in calibrated:32\+decision"),
    ],
)
def test_a_name_of_no_growth_is_refused_everywhere(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_growth(text)
    if text != "chain:2-8":  # a range, which stree bench run tunes
        with pytest.raises(ValueError, match=message):
            parse_methods(f"{text},plain")
