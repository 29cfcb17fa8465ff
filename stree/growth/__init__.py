"""The shape of a draft tree: which of the next tokens a drafter offers become nodes.

A growth is a policy over slots.  Growths know no model: a drafter asks for a ``Plan`` and fills it layer by layer.
"""

from stree.growth.calibrated import Calibrated
from stree.growth.dyspec import DySpec
from stree.growth.estimates import Estimate
from stree.growth.fixed import Chain, Static
from stree.growth.names import parse_growth
from stree.growth.plan import Growth, Layer, Limited, Plan, choose_slots
from stree.growth.positional import RSDC, Sequoia

__all__ = [
    "RSDC",
    "Calibrated",
    "Chain",
    "DySpec",
    "Estimate",
    "Growth",
    "Layer",
    "Limited",
    "Plan",
    "Sequoia",
    "Static",
    "choose_slots",
    "parse_growth",
]
