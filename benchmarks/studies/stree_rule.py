"""What STree's rule for sampled siblings emits, beside the rules of this library, by exact enumeration of one step.

Run: python -m benchmarks.studies.stree_rule [--cases 200] [--vocab 7] [--children 3]

The released code of STree (arXiv 2505.14969, github.com/wyc1997/stree) draws the children of a node without
replacement, sorts them by draft logit, and then makes the multi-step test of SpecInfer, which is exact in draw order
alone.  Here every order of drawn children of a node is enumerated in float64, for random distributions of target and
draft (softmax of standard normal logits).  A rule's error is the total variation between what it emits and the target's
distribution; "accepted" is how often one of the children is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import study

__all__ = ["RULES", "TITLES", "cells", "rows"]

Array = NDArray[np.float64]


def tested(order: Sequence[int], target: Array, draft: Array) -> tuple[Array, float]:
    """Test children in an order by recursive rejection: distribution of the emitted token, and how often accepted."""
    out, reached, residual, rest = np.zeros_like(target), 1.0, target, draft
    for token in order:
        rest = rest / rest.sum()
        chance = min(1.0, residual[token] / rest[token])
        out[token] += reached * chance
        reached *= 1 - chance
        left = np.maximum(residual - rest, 0.0)
        if reached == 0 or not left.sum():
            return out, 1 - reached
        residual, rest = left / left.sum(), np.where(np.arange(len(rest)) == token, 0.0, rest)
    return out + reached * residual, 1 - reached


def matched(order: Sequence[int], target: Array, draft: Array) -> tuple[Array, float]:
    """Draw a token of the target and look for it among the children (MATCH)."""
    return target, float(target[list(order)].sum())


def by_logit(order: Sequence[int], draft: Array) -> list[int]:
    """Sort children by draft probability, the greatest first."""
    return sorted(order, key=lambda token: -draft[token])


Rule = Callable[[Sequence[int], Array, Array], tuple[Array, float]]
RULES: dict[str, Rule] = {
    "rejection, children in draw order (ours)": tested,
    "STree: rejection, children sorted by draft logit": lambda order, p, q: tested(by_logit(order, q), p, q),
    "MATCH on the same children (ours)": matched,
}
TITLES = ("rule", "error, mean", "error, largest", "accepted")
TOP = "MATCH on the most probable children (STree's exact variant, and ours)"


def emitted(rule: Rule, target: Array, draft: Array, children: int) -> tuple[Array, float]:
    """Average a rule over all orders of children that are drawn without replacement."""
    out, accepted = np.zeros_like(target), 0.0
    for order in permutations(range(len(target)), children):
        left = 1 - np.concatenate([[0.0], draft[list(order[:-1])].cumsum()])
        probability = float((draft[list(order)] / left).prod())
        found, chance = rule(order, target, draft)
        out, accepted = out + probability * found, accepted + probability * chance
    return out, accepted


def rows(cases: int, vocab: int, children: int, seed: int = 0) -> list[dict[str, Any]]:
    """Measure all rules on random distributions."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*RULES, TOP)}
    for _ in range(cases):
        logits = np.exp(rng.standard_normal((2, vocab)))
        target, draft = logits / logits.sum(-1, keepdims=True)
        for name, rule in RULES.items():
            out, accepted = emitted(rule, target, draft, children)
            found[name].append((float(abs(out - target).sum() / 2), accepted))
        found[TOP].append((0.0, matched(np.argsort(-draft)[:children].tolist(), target, draft)[1]))
    return [
        {"rule": name, "error_mean": errors.mean(), "error_max": errors.max(), "accepted": accepted.mean()}
        for name, (errors, accepted) in ((name, np.array(pairs).T) for name, pairs in found.items())
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """Write a row of the table under ``TITLES``."""
    return [row["rule"], *(f"{row[name]:.3f}" for name in ("error_mean", "error_max", "accepted"))]


def measure(cases: int = 200, vocab: int = 7, children: int = 3) -> list[dict[str, Any]]:
    """Measure all rules, in one record.

    Args:
        cases: pairs of distributions.
        vocab: tokens.
        children: of the node.
    """
    if not 1 <= children <= vocab or cases < 1:
        raise ValueError(f"--children must be in [1, {vocab}] and --cases at least 1")
    given = {"cases": cases, "vocab": vocab, "children": children}
    return [{"bench": "stree-rule", **given, "rows": rows(**given)}]


if __name__ == "__main__":
    study(measure, TITLES, cells)
