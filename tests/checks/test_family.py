"""The check of model families passes ours, and finds adapters that read trees, rows or states wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_family_models import FAMILIES, family_model, matrix
from helpers.tiny_models import patched, tiny_model
from torch import Tensor

from stree import TokenTree, TreeLM
from stree.models.state import DecodeState
from stree.testing import CheckFailed, check_family


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix(in_ci=FAMILIES))
def test_every_family_passes(family: str) -> None:
    report = check_family(family_model(family))
    assert report.cases == 10 and report.worst < 1e-3


def test_the_model_that_is_checked_stays_as_it_was() -> None:
    model, text = tiny_model("bamba"), torch.tensor([[5, 6, 7]])
    lm, before = patched(model), model(text).logits
    assert check_family(model).worst == check_family(lm).worst
    assert torch.equal(model(text).logits, before)
    assert lm.prefill(lm.new_state(1), text).shape == (1, lm.vocab_size)


def as_chain(lm: TreeLM, state: DecodeState, tree: TokenTree, **options: Any) -> Any:
    parents = torch.where(tree.parents < 0, tree.parents, torch.arange(-1, tree.tokens.shape[1] - 1).int())
    return VERIFY(lm, state, TokenTree.unchecked(tree.tokens, parents), **options)


def of_the_whole_path(lm: TreeLM, state: DecodeState, path: Tensor, lengths: Tensor) -> None:
    COMMIT(lm, state, path, (lengths - 1).clamp(min=1).minimum(lengths))


def raising(lm: TreeLM, state: DecodeState, path: Tensor, lengths: Tensor) -> None:
    raise RuntimeError("shapes disagree")


VERIFY, COMMIT = TreeLM.verify, TreeLM.commit


@pytest.mark.parametrize(
    ("method", "fault", "message"),
    [
        ("verify", as_chain, r"WRONG  a tree of 8, 3 and 12 nodes"),
        ("commit", of_the_whole_path, r"WRONG  a tree after the commit of a path in every row"),
        ("commit", raising, r"tokens in one batch\nthen: RuntimeError: shapes disagree"),
    ],
    ids=["a tree read as a chain", "a path cut short", "a failure"],
)
def test_a_wrong_adapter_is_found(method: str, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeLM, method, fault)
    with pytest.raises(CheckFailed, match=message):
        check_family(tiny_model("mamba2"))


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a transformers model or a TreeLM of one, got str"):
        check_family("mamba2")
    with pytest.raises(ValueError, match="in float32 or float64, got torch.bfloat16 on cpu"):
        check_family(tiny_model("mamba2", torch.bfloat16))
