"""Every family through the Triton versions of its operations, under Triton's interpreter.

What ``backend="auto"`` chooses for CUDA tensors is chosen here on the CPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    patched,
    path_to,
    random_texts,
    random_tree,
    right_padded,
    tree_error,
)
from transformers import PreTrainedModel

from stree import TokenTree
from stree.kernels import dispatch

ATTENTION = {"attention_step", "kv_commit"}


class Asked(set[str]):
    """All operations with a Triton version; keeps those that it was searched for."""

    def __contains__(self, op: object) -> bool:
        self.add(str(op))
        return op in dispatch.TRITON


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let "auto" mean Triton wherever an operation has it; give the set of operations that "auto" was asked for."""
    asked = Asked()
    treat_as_on_device(monkeypatch, triton=True, host_can_read=True, operations=asked)
    return asked


def assert_exact(model: PreTrainedModel) -> None:
    """Require an exact tree, and after a commit another one, verified in two pieces."""
    rng = random.Random(0)
    lm, texts = patched(model), random_texts(rng, [9])
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [5])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]
    path = path_to(tree, 0, 4)
    lm.commit(state, *as_commit([path]))
    texts = extended(texts, tree, [path])
    first = lm.verify(state, TokenTree(tree.tokens[:, :2], tree.parents[:, :2]))
    logits = torch.cat((first, lm.verify(state, tree, first=2)), dim=1)
    assert tree_error(model, texts, tree, logits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", matrix(fast=(), in_ci=("jamba", "minimax", "recurrent_gemma")))
def test_a_family_is_exact_with_the_triton_versions(family: str, asked: set[str]) -> None:
    assert_exact(family_model(family))
    assert asked
    assert asked <= dispatch.TRITON.keys()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_latents_wider_than_other_heads_are_attended_to_by_triton(asked: set[str]) -> None:
    assert_exact(family_model("kimi_linear", kv_lora_rank=300))
    assert {"gated_delta_step", *ATTENTION} <= asked
