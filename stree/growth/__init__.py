"""Growths: policies that decide which slots of a draft tree become nodes.

A growth knows no model.  A drafter asks it for a ``Plan`` and an ``AcceptanceModel`` and fills the plan layer by layer.
The terms (node, rank, slot, value, priority, column) are defined in ``stree.growth.plan``.
"""

from stree.growth.acceptance_model import AcceptanceModel, KeptSlots, Proposal, Slots
from stree.growth.base import BaseGrowth, Growth, learns_alike
from stree.growth.calibrated import Calibrated
from stree.growth.chain import Chain
from stree.growth.depth_stop import DepthStop
from stree.growth.dyspec import DySpec
from stree.growth.eagle2 import Eagle2
from stree.growth.mcsd import DecisionStop, TargetInit
from stree.growth.names import GROWTHS, NamedGrowth, parse_growth, sized_growth
from stree.growth.opt_tree import OptTree
from stree.growth.plan import Layer, Plan, checked_plan, choose_slots
from stree.growth.rsd import RSDC, RSDS
from stree.growth.sequoia import Sequoia
from stree.growth.specinfer import SpecInfer
from stree.growth.static import Static
from stree.growth.stops import STOPS, Confidence, Stop, Stopped

__all__ = [
    "GROWTHS",
    "RSDC",
    "RSDS",
    "STOPS",
    "AcceptanceModel",
    "BaseGrowth",
    "Calibrated",
    "Chain",
    "Confidence",
    "DecisionStop",
    "DepthStop",
    "DySpec",
    "Eagle2",
    "Growth",
    "KeptSlots",
    "Layer",
    "NamedGrowth",
    "OptTree",
    "Plan",
    "Proposal",
    "Sequoia",
    "Slots",
    "SpecInfer",
    "Static",
    "Stop",
    "Stopped",
    "TargetInit",
    "checked_plan",
    "choose_slots",
    "learns_alike",
    "parse_growth",
    "sized_growth",
]
