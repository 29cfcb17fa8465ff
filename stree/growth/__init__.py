"""The shape of a draft tree: which of the next tokens a drafter offers become nodes.

A growth is a policy over slots.  Growths know no model: a drafter asks for a ``Plan`` and fills it layer by layer.
"""

from stree.growth.acceptance_model import Estimate, Notes, Proposal, Slots
from stree.growth.beam import RSDS
from stree.growth.calibrated import Calibrated
from stree.growth.decision import DecisionStop
from stree.growth.dyspec import DySpec
from stree.growth.fixed import Chain, Static
from stree.growth.names import parse_growth
from stree.growth.plan import Growth, Layer, Limited, Plan, choose_slots
from stree.growth.positional import RSDC, Sequoia, SpecInfer
from stree.growth.reranked import Eagle2, OptTree
from stree.growth.stops import Confidence, DepthStop, Stop
from stree.growth.target_init import TargetInit

__all__ = [
    "RSDC",
    "RSDS",
    "Calibrated",
    "Chain",
    "Confidence",
    "DecisionStop",
    "DepthStop",
    "DySpec",
    "Eagle2",
    "Estimate",
    "Growth",
    "Layer",
    "Limited",
    "Notes",
    "OptTree",
    "Plan",
    "Proposal",
    "Sequoia",
    "Slots",
    "SpecInfer",
    "Static",
    "Stop",
    "TargetInit",
    "choose_slots",
    "parse_growth",
]
