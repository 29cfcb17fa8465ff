"""Verification of unrolled paths emits the tokens that tree verification emits."""

from __future__ import annotations

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_pairs import tiny_pair
from torch import Tensor

from stree.bench.execute import Case, execute
from stree.bench.methods import parse_methods
from stree.bench.unrolled import UnrolledLM, UnrolledState

PAIRS = {family: tiny_pair(family) for family in ("mamba2", "bamba")}
PROMPT = tuple(range(5, 18))


@pytest.mark.parametrize(
    ("family", "tree", "temperature"),
    slow_unless(
        lambda family, *_: family == "mamba2",
        [("mamba2", "dyspec:7", 0.8), ("bamba", "static:3,2", 0.0), ("bamba", "stree", 0.8)],
    ),
)
def test_unrolled_paths_emit_the_tokens_of_the_tree(family: str, tree: str, temperature: float) -> None:
    case = Case((PROMPT,), 12, temperature, seed=3)
    ours, unrolled = parse_methods(f"{tree},unrolled:{tree}")
    wanted = execute(PAIRS[family], ours, case)
    assert wanted.stats["tau"] > 1.2  # paths of several nodes are committed
    run = execute(PAIRS[family], unrolled, case)
    assert run.tokens == wanted.tokens and run.stats["steps"] == wanted.stats["steps"]


class _WrongRow(UnrolledLM):
    """A control: keeps the first row whatever was accepted."""

    def commit(self, state: UnrolledState, path: Tensor, path_lengths: Tensor) -> None:  # type: ignore[override]
        super().commit(state, torch.zeros_like(path), path_lengths)


def test_a_baseline_that_keeps_the_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((PROMPT,), 12, 0.0)
    ours, unrolled = parse_methods("static:3,2,unrolled:static:3,2")
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _WrongRow)
    assert execute(PAIRS["mamba2"], unrolled, case).tokens != execute(PAIRS["mamba2"], ours, case).tokens
