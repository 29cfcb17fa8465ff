"""Several threads use one model, each with a state of its own, and get what one thread alone gets."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.calls import together
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import EVERY_ADAPTER, EVERY_STATE, FAMILIES, family_model, matrix
from helpers.tiny_models import as_commit, patched, path_to, random_texts, random_tree, right_padded
from torch import Tensor, nn

import stree
from stree import TreeLM


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(lm: TreeLM, seed: int) -> list[Tensor]:
    """Prefill, score three trees with commits between them, and return all logits."""
    rng = random.Random(seed)
    state = lm.new_state(2, 64, 8)
    logits = [lm.prefill(state, *right_padded(random_texts(rng, [9 + seed % 3, 4])))]
    for _ in range(3):
        tree = random_tree(rng, [8, 8])
        logits.append(lm.verify(state, tree))
        lm.commit(state, *as_commit([path_to(tree, row, 7) for row in range(2)]))
    return logits


@pytest.mark.parametrize("family", matrix(fast=("jamba",)))
def test_threads_with_separate_states_do_not_disturb_each_other(family: str, eager_switching: None) -> None:
    lm = TreeLM(family_model(family))
    expected = [run(lm, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda seed: run(lm, seed), range(6))]
    assert all(map(torch.equal, sum(found, []), sum(expected, [])))


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value.flip(0) for name, value in model.state_dict().items()})


def optimized(model: nn.Module) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    for number, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(weight)
    torch.optim.SGD(weights, lr=0.01).step()


def check_fresh(family: str, threads: int, rounds: int, *, is_compiled: bool) -> None:
    """Let threads share a model that nothing has run on yet, and write to its weights between rounds."""
    changes: dict[str, Any] = {"num_hidden_layers": 1} if is_compiled and family == "mamba2" else {}
    model = family_model(family, **changes)
    alone = patched(model)
    lm = TreeLM(model)
    lm.compile()
    lm.is_compiled = is_compiled  # else weights are packed only
    for number in range(rounds):
        found = together(lambda seed: run(lm, seed), threads)
        wanted = [run(alone, seed) for seed in range(threads)]
        for one, other in zip(sum(found, []), sum(wanted, []), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-4 * float(other.abs().max()))
        for changed in (lm.model, alone.model):
            (scaled, optimized, loaded)[number % 3](changed)


@pytest.mark.parametrize("family", matrix(fast=("lfm2",), in_ci=EVERY_STATE))
def test_threads_share_a_fresh_model_through_changes_of_its_weights(family: str, eager_switching: None) -> None:
    check_fresh(family, threads=4, rounds=4, is_compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix(["mamba2", "lfm2", "qwen3_5_text", "jamba"], fast=[], in_ci=["mamba2"]))
def test_threads_share_a_fresh_compiled_model_through_changes_of_its_weights(
    family: str, eager_switching: None, traced_only: None
) -> None:
    check_fresh(family, threads=4, rounds=4, is_compiled=True)


CASES = [(family, 4, 16) for family in FAMILIES] + [(family, 8, 400) for family in EVERY_ADAPTER]


@pytest.mark.parametrize(
    ("family", "threads", "count"),
    slow_unless(
        lambda *case: False, CASES, in_ci=lambda family, threads, count: threads == 4 and family in EVERY_STATE
    ),
)
def test_threads_generate_the_texts_of_one_thread(family: str, threads: int, count: int, eager_switching: None) -> None:
    lm, prompts = TreeLM(family_model(family)), random_texts(random.Random(0), [5, 9, 7, 9])

    def text(prompt: list[int]) -> list[list[int]]:
        return stree.generate(lm, [prompt], budget=6, max_new_tokens=12, stop_token_ids=[]).sequences

    expected = [*map(text, prompts)]
    with ThreadPoolExecutor(threads) as pool:
        assert [*pool.map(text, prompts * (count // 4))] == expected * (count // 4)
