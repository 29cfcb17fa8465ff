"""The names of growths in one line, for ``--help`` and messages; ``stree.growth.names`` reads them."""

from __future__ import annotations

__all__ = ["GROWTHS"]

GROWTHS = (
    "calibrated, dyspec, sequoia, opt-tree or eagle2; each also as NAME:NODES, which sets the budget (root counted), "
    "or NAME:NODESxDEPTH, with the most draft calls, and with options, as dyspec:16,form=heap or calibrated:depth=6; "
    "chain:DEPTH, static:WIDTH,WIDTH,..., rsdc:WIDTH,..., specinfer:WIDTH,..., rsds:WIDTH,DEPTH, stree, "
    "lossy-target-init:WIDTH,DEPTH; stop rules behind them: +sure:PROB, +depth-stop[:LOG], +decision[:PROB]"
)
